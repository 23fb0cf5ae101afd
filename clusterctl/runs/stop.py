"""Stop the ranks of a run on its nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import abandoned
from clusterctl.runs.query import query_nodes
from clusterctl.transport.fanout import raise_failures

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.runs.state import RunState
    from clusterctl.runs.watching.stall import Hang
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections


# Seconds for the nodes to report the state of an attempt before it is watched without the reports.
QUERY_LIMIT = 2.0
# Seconds that `stop` waits for a controller to copy the last bytes.
SETTLE = 15.0


def stop_run(run: RunDir, connections: Connections, grace: float | None = None) -> dict[str, int]:
    """Stop a run on every node; return how many processes are left on each, which should be 0.

    Only the record of the run is needed: all other files of its folder may be damaged.
    """
    if not run.phase().is_final:
        # Do this first, so that no attempt follows.
        run.write_json(run.stop_asked, {"asked": time.time()})
    run.add_event("stop_asked")
    while True:
        record = run.read_record()
        limit = record.job.grace if grace is None else grace
        left = stop_nodes(connections, record.cluster.nodes, run, limit, strict=True)
        _wait_for_controller(run)
        # Another attempt may have begun just before the stop was requested.
        if run.read_record().attempt == record.attempt:
            abandoned.clear(run, connections)
            return left


def _wait_for_controller(run: RunDir) -> None:
    """Wait until a living controller has recorded the run's end."""
    deadline = time.monotonic() + SETTLE
    while run.controller() not in (None, os.getpid()) and time.monotonic() < deadline:
        if run.phase().is_final:
            return
        time.sleep(0.05)


def stop_half_started(run: RunDir, connections: Connections) -> RunState | None:
    """Stop an attempt that did not start on every node, and return its state; None if it did.

    The previous controller may have died after it wrote the record and before every node had started.
    """
    state = query_nodes(run, connections, patience=QUERY_LIMIT)
    answered = (name for name in state.nodes if name not in state.unreachable)
    if not any(state.nodes[name] is Phase.UNKNOWN for name in answered):
        return None
    stop_nodes(connections, run.read_record().cluster.nodes, run, grace=0.0)
    return replace(state, phase=Phase.FAILED)


@dataclass(frozen=True)
class Stopped:
    """The answer of a node that stopped an attempt: how many processes are left."""

    left: int


def stop_nodes(
    connections: Connections,
    nodes: Sequence[Node],
    run: RunDir,
    grace: float,
    strict: bool = False,
    stacks: bool = False,
    hang: Hang | None = None,
) -> dict[str, int]:
    """Stop an attempt on some nodes; return how many processes are left on each that answered.

    `stacks` lets the ranks write their stacks first. `hang` is recorded as the failure of its node. `strict` raises an
    error if a node does not answer.
    """
    record = run.read_record()

    def ask(node: Node, link: Connection) -> int:
        where = {"run_dir": record.run_dirs[node.name], "attempt": record.attempt}
        why = {"hang": hang.as_failure()} if hang and hang.node == node.name else {}
        return link.ask(Stopped, "stop", {**where, "grace": grace, "stacks": stacks, **why}).left

    outcomes = connections.on_each(nodes, ask)
    if strict:
        raise_failures(outcomes)
    return {
        outcome.node.name: outcome.value
        for outcome in outcomes
        if outcome.error is None and outcome.value is not None
    }
