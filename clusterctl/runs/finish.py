"""End a run: copy the files of `collect` to this machine, and record how the run ended."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.runs.causes.cause import record_end
from clusterctl.runs.query import query_nodes
from clusterctl.runs.state import NodeAnswer, RunState, write_state
from clusterctl.text import plural
from clusterctl.transport.fanout import on_all
from clusterctl.wire import contract

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.run_lines import Metric
    from clusterctl.transfer.push import PushResult
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections


def finish(run: RunDir, connections: Connections) -> RunState:
    """Conclude a run whose watch has ended; return its state."""
    return conclude(run, connections, ended(run, connections))


def ended(
    run: RunDir,
    connections: Connections,
    gone: Collection[str] = (),
    lost: Collection[str] = (),
    reports: Mapping[str, NodeAnswer] = MappingProxyType({}),
) -> RunState:
    """Return how a watched attempt ended; nodes that are `gone`, `lost` or cannot be asked count as lost.

    Nodes in `reports` are not asked again.
    """
    state = query_nodes(run, connections, gone, reports=reports)
    nodes: dict[str, Phase] = {
        name: Phase.LOST if phase is Phase.UNKNOWN or name in lost else phase
        for name, phase in state.nodes.items()
    }
    return replace(state, nodes=nodes, phase=Phase.of_nodes(nodes.values()))


def conclude(run: RunDir, connections: Connections, state: RunState) -> RunState:
    """Copy the files of `collect` to this machine, then record the end; return the state."""
    try:
        for name in collect(run, connections):
            run.add_event("collected", name=name)
    except ClusterctlError as error:
        run.add_event("collect_failed", reason=error.message)
    for node, count in state.adopted.items():
        text = f"{node}: {plural(count, 'detached process', 'es')} of the ranks ended with them"
        run.add_event("note", node=node, text=text)
    for node, names in state.left.items():
        run.add_event("note", node=node, text=f"{node}: could not be ended: {', '.join(names)}")
    cause = record_end(run, state)
    write_state(run, state)
    facts = {"verdict": state.verdict, "cause": cause.title if cause else ""}
    run.add_event("ended", phase=state.phase, **{name: text for name, text in facts.items() if text})
    return state


def collect(run: RunDir, connections: Connections) -> list[str]:
    """Copy the files of the job's `collect` to this machine; return their names."""
    wanted = run.read_record().job.collect
    names = bring_checkpoint(run, connections) if contract.CHECKPOINT_DIR in wanted else []
    if contract.PROFILE_DIR in wanted:
        names += bring_traces(run, connections)
    if "work" in wanted:
        names += [f"work/{name}" for name in bring_outputs(run, connections, run.root / "work")]
    return names


def bring_outputs(run: RunDir, connections: Connections, dest: Path) -> dict[str, PushResult]:
    """Copy what the ranks wrote into their working folders to DEST/<node>; return the results by node.

    Pushed files come too if a rank changed them.
    """
    from clusterctl.transfer.pull import pull_tree

    record = run.read_record()
    paths = record.work_dirs
    nodes = [node for node in record.cluster.nodes if node.name in paths]

    def bring(node: Node, link: Connection) -> PushResult:
        code = record.code_paths.get(node.name, "")
        return pull_tree(link, paths[node.name], dest / node.name, without=code)

    return on_all(connections, nodes, bring)


def bring_checkpoint(run: RunDir, connections: Connections) -> list[str]:
    """Copy the newest valid checkpoint from the nodes; return its name, or an empty list.

    Each node has the files of its own ranks and the same manifest: together they are the complete folder.
    """
    from clusterctl.transfer.pull import pull_tree

    record = run.read_record()
    passed_over = superseded_steps(run.metric_lines())

    def steps(node: Node, link: Connection) -> list[str]:
        names = link.directory(NodeFiles(record.run_dirs[node.name]).checkpoints).names("d")
        return [name for name in names if (step := step_of(name)) is not None and step not in passed_over]

    held = on_all(connections, record.cluster.nodes, steps)
    newest = max((name for names in held.values() for name in names), default="")
    for node in record.cluster.nodes:
        if newest and newest in held[node.name]:
            remote = NodeFiles(record.run_dirs[node.name]).checkpoints
            pull_tree(connections.of(node), f"{remote}/{newest}", run.checkpoints / newest)
    return [newest] if newest else []


def bring_traces(run: RunDir, connections: Connections) -> list[str]:
    """Copy the profiler's traces from every node that has some; return their names."""
    from clusterctl.transfer.pull import pull_tree

    record = run.read_record()

    def bring(node: Node, link: Connection) -> list[str]:
        remote = posixpath.join(record.run_dirs[node.name], contract.PROFILE_DIR)
        names = link.directory(remote).names("f")
        if names:
            pull_tree(link, remote, run.root / contract.PROFILE_DIR / node.name)
        return names

    return [name for names in on_all(connections, record.cluster.nodes, bring).values() for name in names]


def superseded_steps(metrics: Iterable[Metric]) -> set[int]:
    """Return the steps of checkpoints that a resumed attempt skipped, which it does only if they are damaged."""
    saved: set[int] = set()
    passed_over: set[int] = set()
    for metric in metrics:
        step = metric.step
        if step is None:
            continue
        if metric.kind == "checkpoint":
            saved.add(step)
            passed_over.discard(step)
        elif metric.kind == "start":
            passed_over |= {number for number in saved if number > step}
    return passed_over


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder, `step-00000300`."""
    word = name.rpartition("-")[2]
    return int(word) if word.isascii() and word.isdecimal() else None
