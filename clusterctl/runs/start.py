"""Start, watch, stop, ask: verbs over a Plan, the connections to its nodes, and the run's folder.

A port for rank 0 to listen on, that is free on the master itself and stays so until it is bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import plan
from clusterctl.jobs.job import Job
from clusterctl.jobs.record import cluster_of, job_of, write_run
from clusterctl.jobs.run_folder import (
    NodeFiles,
    RunDir,
    make_runs,
    new_run_id,
)
from clusterctl.runs.master_port import free_port
from clusterctl.runs.stage import (
    Stored,
    Tell,
    push_code,
    push_data,
)
from clusterctl.runs.state import RunState, current_state
from clusterctl.runs.stop import stop_nodes
from clusterctl.text import plural
from clusterctl.transport.fanout import on_all
from clusterctl.transport.link import RequestFailed

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.fanout import Connection, Connections


# -- start --------------------------------------------------------------------------------------------------


def launch(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    runs: Path,
    tell: Tell,
    run: RunDir | None = None,
    spares: Sequence[Node] = (),
) -> RunDir:
    """Push, write and start a run on all of its nodes, or leave none of it running; gives the run's folder.

    Spare nodes get what is pushed too: a restart then needs nothing that may have changed here since.
    """
    run = run or new_run(job, runs)
    everywhere = replace(cluster, nodes=(*cluster.nodes, *spares))
    hellos = reach(everywhere, connections, tell)
    code = push_code(everywhere, job, connections, tell, runs)
    data = push_data(everywhere, job, connections, tell)
    facts = prepare(cluster, job, connections, hellos, Stored(code, data), tell)
    made = plan.make_plan(cluster, job, replace(facts, run_id=run.run_id))
    try:
        start_all(run, made, connections, tell, spares)
    except BaseException as problem:
        _write_unstarted(run, cluster, problem)
        raise
    return run


def _write_unstarted(run: RunDir, cluster: Cluster, problem: BaseException) -> None:
    """An attempt that never began: it failed, or somebody thought better of it."""
    if not run.record.exists():
        # What kept it from being written is what is to be told.
        return
    phase = "failed" if isinstance(problem, Exception) else "stopped"
    run.write_json(run.state, asdict(RunState(phase, dict.fromkeys(cluster.names, "stopped"))))


def new_run(job: Job, runs: Path) -> RunDir:
    """A run's folder-to-be: known before anything starts, so that an interrupt at any moment finds it."""
    return RunDir(make_runs(runs) / new_run_id(job.name))


def resume(
    run: RunDir, connections: Connections, tell: Tell, chosen: Callable[[], Cluster] | None = None
) -> None:
    """Start an ended run's next attempt: the same nodes or those `chosen`, the same code, data and folders."""
    state = current_state(run, connections)
    if not state.is_final:
        hint = f"clusterctl attach {run.run_id} follows it, clusterctl stop {run.run_id} ends it"
        raise UsageError(f"{run.run_id} is {state.phase}, not ended", hint)
    run.stop_asked.unlink(missing_ok=True)
    run.add_event("resumed")
    try:
        start_next(run, chosen() if chosen else cluster_of(run), connections, tell)
    except BaseException as problem:
        _write_unstarted(run, cluster_of(run), problem)
        raise


def start_next(
    run: RunDir,
    cluster: Cluster,
    connections: Connections,
    tell: Tell,
    before: Callable[[plan.Plan], None] = lambda made: None,
) -> None:
    """Start a run's next attempt on these nodes; the rank table and the hostfile are theirs."""
    record, job = run.read_record(), job_of(run)
    hellos = reach(cluster, connections, tell)
    stored = Stored(record["code_paths"], record["data_paths"])
    _still_there(cluster, connections, stored)
    facts = prepare(cluster, job, connections, hellos, stored, tell)
    facts = replace(facts, run_id=run.run_id, attempt=record["attempt"] + 1)
    made = plan.make_plan(cluster, job, facts)
    before(made)
    start_all(run, made, connections, tell)


def reach(cluster: Cluster, connections: Connections, tell: Tell) -> dict[str, dict[str, Any]]:
    """Every node's own word on who it is."""
    hellos = on_all(connections, cluster.nodes, lambda node, link: link.hello())
    tell("reach", f"{plural(len(hellos), 'node')} reached")
    _same_machine_twice(cluster, hellos)
    return hellos


def prepare(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    hellos: dict[str, dict[str, Any]],
    stored: Stored,
    tell: Tell,
) -> plan.Facts:
    """What only the nodes can say of a run that is about to start."""
    from clusterctl.ranktable import ask as ranktable_ask

    table = ""
    if plan.rank_table_wanted(job, cluster):
        asked = ranktable_ask.ask_nodes(cluster, connections, job.devices)
        table = asked.table.render()
        seen = "".join(f"; {words}" for words in (asked.detected, *asked.elsewhere) if words)
        tell("ranktable", f"built from the answers of {plural(len(cluster.nodes), 'node')}{seen}")
    return plan.Facts(
        master_port=job.master_port or free_port(connections.of(cluster.nodes[0]), cluster.nodes[0]),
        workdirs={name: hello["workdir"] for name, hello in hellos.items()},
        homes={name: hello["home"] for name, hello in hellos.items()},
        cpus={name: hello["cpus"] for name, hello in hellos.items()},
        code_paths=stored.code,
        data_paths=stored.data,
        forwarded=_forwarded(job),
        rank_table=table,
    )


def start_all(
    run: RunDir, made: plan.Plan, connections: Connections, tell: Tell, spares: Sequence[Node] = ()
) -> None:
    """Write and start an attempt on all of its nodes; where one can't, or the user asked for the end, on none."""
    nodes = made.cluster.nodes
    write_run(run, made, spares)
    run.cause.unlink(missing_ok=True)
    try:
        on_all(connections, nodes, lambda node, link: _write_files(link, _node_plan(made, node), made))
        on_all(connections, nodes, lambda node, link: _start(link, _node_plan(made, node), made))
        # Asked after we looked last, so the asker may have stopped the attempt before.
        if run.stop_asked.exists():
            raise WorkFailed(f"{run.run_id} was stopped while attempt {made.facts.attempt} started")
        run.add_event("started", nodes=made.cluster.names, ranks=made.world_size, attempt=made.facts.attempt)
        what = f"{plural(made.world_size, 'rank')} on {plural(len(nodes), 'node')}, master {made.master}"
        tell("start", what + (f", attempt {made.facts.attempt}" if made.facts.attempt > 1 else ""))
    except BaseException as problem:
        run.add_event("start_failed", reason=str(problem))
        stop_nodes(connections, nodes, run, grace=0.0)
        raise


def _still_there(cluster: Cluster, connections: Connections, stored: Stored) -> None:
    on_all(connections, cluster.nodes, lambda node, link: still_there(node, link, stored))


def still_there(node: Node, link: Connection, stored: Stored) -> None:
    """Raise where a node answers no more, or has lost what was pushed for the run."""
    for kind, paths in (("code", stored.code), ("data", stored.data)):
        if node.name in paths and link.call("list", {"path": paths[node.name]})["missing"]:
            hint = "launch the job anew: it is pushed again"
            raise WorkFailed(f"{node.name}: the run's {kind} is gone from {paths[node.name]}", hint)
    link.hello()


def _forwarded(job: Job) -> dict[str, str]:
    from clusterctl.settings import inherited

    found = inherited(job.forward)
    missing = [name for name in job.forward if name not in found]
    if missing:
        raise UsageError(
            f"{job.source}: forward: {', '.join(missing)} is not set here", "set it, or take it off the list"
        )
    return found


def _same_machine_twice(cluster: Cluster, hellos: dict[str, dict[str, Any]]) -> None:
    """One work folder on one kernel under two names would give two nodes one run folder."""
    seen: dict[tuple[str, str, str], str] = {}
    for node in cluster.nodes:
        hello = hellos[node.name]
        place = (str(hello["hostname"]), str(hello["boot_id"]), str(hello["workdir"]))
        if place in seen:
            raise UsageError(
                f"{seen[place]} and {node.name} are the same machine ({place[0]})",
                "keep one of them in the inventory",
            )
        seen[place] = node.name


def _node_plan(made: plan.Plan, node: Node) -> plan.NodePlan:
    return next(one for one in made.nodes if one.node.name == node.name)


def _write_files(link: Connection, one: plan.NodePlan, made: plan.Plan) -> None:
    files = NodeFiles(one.run_dir)
    link.put(files.hostfile, made.hostfile.encode(), mode=0o644)
    if made.facts.rank_table:
        link.put(files.rank_table, made.facts.rank_table.encode(), mode=0o644)
    if one.train is not None:
        link.put(files.train_config, json.dumps(one.train, indent=2).encode(), mode=0o644)


def _start(link: Connection, one: plan.NodePlan, made: plan.Plan) -> dict[str, Any]:
    ranks = [asdict(process) for process in one.processes]
    spec = {
        "run_id": made.facts.run_id,
        "attempt": made.facts.attempt,
        "node": one.node.name,
        "ranks": ranks,
        "grace": made.job.grace,
        "hang_after": made.job.hang_after,
        "kind": one.node.kind,
        "devices": [process.device for process in one.processes],
        "share_devices": made.job.share_devices,
        "master_port": made.facts.master_port if one is made.nodes[0] else None,
    }
    try:
        return link.call("start", {"run_dir": one.run_dir, "spec": spec})
    except RequestFailed as refused:
        if refused.kind == "in_use":
            refused.hint = (
                "clusterctl runs, clusterctl stop; other --devices; --share-devices takes them all the same"
            )
        raise


# -- ask, stop, bring home ----------------------------------------------------------------------------------
