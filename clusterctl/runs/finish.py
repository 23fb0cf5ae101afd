"""End a run: bring home what the job asked for and record how it ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from clusterctl import contract
from clusterctl.errors import ClusterctlError
from clusterctl.jobs.record import cluster_of
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.runs.state import RunState, _phase, query_nodes

if TYPE_CHECKING:
    from clusterctl.transport.fanout import Connections


def finish(run: RunDir, connections: Connections) -> RunState:
    """After the watch: what the job asked for comes home, then the end is written down."""
    return conclude(run, connections, ended(run, connections))


def ended(
    run: RunDir, connections: Connections, gone: Collection[str] = (), lost: Collection[str] = ()
) -> RunState:
    """How an attempt that was watched to its end came out; a node that is `gone`, or can't be asked, is lost too."""
    state = query_nodes(run, connections, gone)
    nodes = {
        name: "lost" if phase == "unknown" or name in lost else phase for name, phase in state.nodes.items()
    }
    return replace(state, nodes=nodes, phase=_phase(list(nodes.values())))


def conclude(run: RunDir, connections: Connections, state: RunState) -> RunState:
    """The run's last word: what the job asked for comes home, then the end is written down."""
    try:
        for name in collect(run, connections):
            run.add_event("collected", name=name)
    except ClusterctlError as error:
        run.add_event("collect_failed", reason=error.message)
    from clusterctl.runs.cause import keep_cause

    cause = keep_cause(run, state)
    run.write_json(run.state, asdict(state))
    more = {"verdict": state.verdict, "cause": cause.title if cause else ""}
    run.add_event("ended", phase=state.phase, **{name: said for name, said in more.items() if said})
    return state


def collect(run: RunDir, connections: Connections) -> list[str]:
    """Bring home what the job asked for beside its logs; gives the names of what came."""
    wanted = run.read_record()["job"]["collect"]
    came = bring_checkpoint(run, connections) if contract.CHECKPOINT_DIR in wanted else []
    if contract.PROFILE_DIR in wanted:
        from clusterctl.runs.traces import bring_traces

        came += bring_traces(run, connections)
    return came


def bring_checkpoint(run: RunDir, connections: Connections) -> list[str]:
    """Bring the newest checkpoint home from the first node; gives its name, if there is one."""
    from clusterctl.transfer.pull import pull_tree

    first = cluster_of(run).nodes[0]
    link = connections.of(first)
    remote = NodeFiles(run.read_record()["run_dirs"][first.name]).checkpoints
    names = [
        one["name"]
        for one in link.call("list", {"path": remote})["entries"]
        if one["kind"] == "d" and not one["name"].startswith(".")
    ]
    for name in names[-1:]:
        pull_tree(link, f"{remote}/{name}", run.checkpoints / name)
    return names[-1:]
