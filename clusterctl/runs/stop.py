"""Stop the ranks of a run on its nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterctl.jobs.record import cluster_of
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import abandoned
from clusterctl.runs.state import FINAL
from clusterctl.transport.fanout import raise_failures

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.runs.stall import Hang
    from clusterctl.transport.fanout import Connection, Connections


# Seconds that `stop` gives a controller to bring the last bytes home.
SETTLE = 15.0


def stop_run(run: RunDir, connections: Connections, grace: float | None = None) -> dict[str, int]:
    """Ask every node to end its ranks; how many processes are left on each, which should be 0."""
    if run.read_state().get("phase") not in FINAL:
        # Before all else: no attempt may follow.
        run.write_json(run.stop_asked, {"asked": time.time()})
    run.add_event("stop_asked")
    while True:
        record = run.read_record()
        given = record["job"]["grace"] if grace is None else grace
        left = stop_nodes(connections, cluster_of(run).nodes, run, given, strict=True)
        _let_conclude(run)
        # Else one began just before it was asked.
        if run.read_record()["attempt"] == record["attempt"]:
            abandoned.clear(run, connections)
            return left


def _let_conclude(run: RunDir) -> None:
    """A controller that lives writes the run's end; what reads the folder next should find it there."""
    deadline = time.monotonic() + SETTLE
    while run.controller() not in (None, os.getpid()) and time.monotonic() < deadline:
        if run.read_state().get("phase") in FINAL:
            return
        time.sleep(0.05)


def stop_nodes(
    connections: Connections,
    nodes: Sequence[Node],
    run: RunDir,
    grace: float,
    strict: bool = False,
    stacks: bool = False,
    hang: Hang | None = None,
) -> dict[str, int]:
    """End an attempt on some nodes; with `stacks`, its ranks say first where they stand; `hang` is why, on its node."""
    record = run.read_record()

    def ask(node: Node, link: Connection) -> int:
        where = {"run_dir": record["run_dirs"][node.name], "attempt": record["attempt"]}
        why = {"hang": hang.as_failure()} if hang and hang.node == node.name else {}
        return int(link.call("stop", {**where, "grace": grace, "stacks": stacks, **why})["left"])

    outcomes = connections.on_each(nodes, ask)
    if strict:
        raise_failures(outcomes)
    return {
        outcome.node.name: outcome.value
        for outcome in outcomes
        if outcome.error is None and outcome.value is not None
    }
