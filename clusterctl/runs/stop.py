"""Stop the ranks of a run on its nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError, StopIncomplete, UsageError
from clusterctl.inventory.nodeset import fold
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import abandoned
from clusterctl.runs.decide.attempt import StopRequest
from clusterctl.runs.decide.run import stop
from clusterctl.text import rank_text
from clusterctl.transport.fanout import raise_failures

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.record import RunRecord
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections, Outcome


# Seconds that `stop` waits for a controller to copy the last bytes.
SETTLE = 15.0


def stop_run(run: RunDir, connections: Connections, grace: float | None = None) -> dict[str, int]:
    """Stop a run on every node; return how many processes are left on each, which should be 0.

    Only the record of the run is needed: all other files of its folder may be damaged, and its disk full. Raise
    StopIncomplete if a node does not answer; the run's controller stops that node when it answers again.
    """
    unrecorded = ""
    outcomes: Sequence[Outcome[int]] = ()
    process = stop(run.phase().is_final)
    result: Any = None
    record = run.read_record()
    try:
        while True:
            match process.send(result):
                case "record":
                    unrecorded = request_stop(run, grace)
                case "attempt":
                    record = run.read_record()
                    result = record.attempt
                case "send":
                    request = StopRequest(_grace(record, grace))
                    outcomes = send_stop(connections, record.cluster.nodes, run, request)
                    result = [outcome.node.name for outcome in outcomes if not outcome.ok]
                case "await":
                    _wait_for_controller(run)
    except StopIteration as end:
        missed: list[str] = end.value
    with suppress(OSError):
        abandoned.clear(run, connections)
    if missed:
        raise _incomplete(run, record, outcomes, unrecorded)
    if unrecorded and run.is_watched() and not run.phase().is_final:
        raise StopIncomplete(
            f"the ranks are stopped, but {unrecorded}, and the controller may start them again",
            f"free some space, then: clusterctl stop {run.run_id}",
        )
    return {outcome.node.name: outcome.get() for outcome in outcomes}


def read_request(run: RunDir, record: RunRecord) -> StopRequest:
    """Return the request that the run's folder records; a damaged one asks for the grace of the job."""
    try:
        value = run.read_json(run.stop_asked)
    except UsageError:
        value = None
    grace = value.get("grace") if isinstance(value, dict) else None
    return StopRequest(_grace(record, grace if isinstance(grace, (int, float)) else None))


def _grace(record: RunRecord, grace: float | None) -> float:
    return record.job.grace if grace is None else grace


def request_stop(run: RunDir, grace: float | None) -> str:
    """Record that the run must stop, so that no attempt follows; return why that failed, or ""."""
    with suppress(OSError):
        run.add_event("stop_asked")
    try:
        run.write_json(run.stop_asked, {"asked": time.time(), "grace": grace})
    except OSError as problem:
        try:
            # A further name of a file needs neither a block of the disk nor an inode.
            os.link(run.record, run.stop_asked)
        except FileExistsError:
            return ""
        except OSError:
            return f"{run.stop_asked}: cannot be written: {problem.strerror}"
    return ""


def _incomplete(
    run: RunDir, record: RunRecord, outcomes: Sequence[Outcome[int]], unrecorded: str
) -> StopIncomplete:
    """Return the error that names the ranks which may still run, and who ends them."""
    lines = []
    try:
        raise_failures(outcomes)
    except ClusterctlError as error:
        lines.append(error.message)
    missed = [outcome.node.name for outcome in outcomes if not outcome.ok]
    for name in missed:
        ranks = record.ranks.get(name, ())
        lines.append(f"{rank_text(ranks)} on {name} may still run")
    lines += [unrecorded] if unrecorded else []
    return StopIncomplete("\n".join(lines), will_stop(run, missed), missed)


def will_stop(run: RunDir, missed: Sequence[str]) -> str:
    """Return in words who stops the ranks on nodes that a stop did not reach."""
    back = f"when {fold(missed)} answer{'s' * (len(missed) == 1)} again"
    if pid := run.controller() or run.clearer():
        return f"process {pid} here, which controls the run, stops them {back}"
    return f"no controller is left to stop them {back}: then repeat `clusterctl stop {run.run_id}`"


def _wait_for_controller(run: RunDir) -> None:
    """Wait until a living controller has recorded the run's end."""
    deadline = time.monotonic() + SETTLE
    while run.controller() not in (None, os.getpid()) and time.monotonic() < deadline:
        if run.phase().is_final:
            return
        time.sleep(0.05)


@dataclass(frozen=True)
class Stopped:
    """The answer of a node that stopped an attempt: how many processes are left."""

    left: int


def stop_nodes(
    connections: Connections, nodes: Sequence[Node], run: RunDir, request: StopRequest
) -> dict[str, int]:
    """Stop an attempt on some nodes; return how many processes are left on each that answered."""
    outcomes = send_stop(connections, nodes, run, request)
    return {outcome.node.name: outcome.get() for outcome in outcomes if outcome.ok}


def send_stop(
    connections: Connections, nodes: Sequence[Node], run: RunDir, request: StopRequest
) -> list[Outcome[int]]:
    """Stop an attempt on some nodes; return for each how many processes are left, or why it could not be told."""
    record = run.read_record()

    def ask(node: Node, link: Connection) -> int:
        where = {"run_dir": record.run_dirs[node.name], "attempt": record.attempt}
        hang = request.hang
        why = {"hang": hang.as_failure()} if hang and hang.node == node.name else {}
        how = {"grace": request.grace, "abort": request.abort}
        return link.ask(Stopped, "stop", {**where, **how, **why}).left

    return connections.on_each(nodes, ask)
