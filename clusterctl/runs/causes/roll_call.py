"""Call the roll of a run's ranks on all nodes, keep it in the run's folder, and say which rank the others wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.logs.store import last_lines
from clusterctl.runs.causes.blame import STOPPED, Observation, judge
from clusterctl.runs.causes.mismatch import ABORTED, stack_in
from clusterctl.runs.causes.workers import own_lines
from clusterctl.transport.fanout import within
from clusterctl.wire.typed_json import BadValue, decode, encode

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.runs.state import RankState, RunState
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections

# Seconds that nodes have to answer; they take one, and four if py-spy does not end.
LIMIT = 6.0
# Last lines of a log in which the stacks of an aborted rank are searched.
READ = 1000


@dataclass(frozen=True)
class Roll:
    """The observations of all ranks that answered, `seconds` after the last progress."""

    ranks: tuple[Observation, ...] = ()
    seconds: float = 0.0


def call_roll(
    connections: Connections,
    record: RunRecord,
    nodes: Sequence[Node],
    seconds: float,
    *,
    save: bool = False,
    only: int | None = None,
) -> Roll:
    """Return where the ranks of some nodes stand, or one of them; `save` also writes their stacks to their logs."""

    def ask(node: Node, link: Connection) -> Roll:
        where = {"run_dir": record.run_dirs[node.name], "attempt": record.attempt, "save": save, "only": only}
        return link.ask(Roll, "roll_call", where)

    outcomes = within(connections, nodes, ask, LIMIT)
    found = [
        replace(seen, node=outcome.node.name, device=_device(record, outcome.node.name, seen))
        for outcome in outcomes
        if outcome.ok
        for seen in outcome.get().ranks
    ]
    if not any(seen.unheard for seen in found):
        # Only dead links need them, and a rank of many groups has hundreds.
        found = [replace(seen, ends=()) for seen in found]
    return Roll(tuple(sorted(found, key=lambda seen: seen.rank)), seconds)


def _device(record: RunRecord, node: str, seen: Observation) -> int | None:
    if not seen.worker:
        return record.device_of(node, seen.rank)
    devices = record.devices_on(node)
    local = seen.local_rank
    return devices[local] if local is not None and local < len(devices) else None


def keep_roll(run: RunDir, attempt: int, roll: Roll) -> None:
    """Record a roll call, unless the disk is full: the ranks must be ended all the same."""
    value = encode(roll)
    assert isinstance(value, dict)
    with contextlib.suppress(OSError):
        run.write_json(run.roll_call(attempt), value)


def read_roll(run: RunDir, attempt: int) -> Roll | None:
    """Return the roll call of an attempt that hung; None if there was none, or if it cannot be read.

    Ranks that were aborted have written their stacks to their logs since.
    """
    path = run.roll_call(attempt)
    with contextlib.suppress(BadValue, UsageError):
        if path.exists():
            roll = decode(Roll, run.read_json(path))
            return replace(roll, ranks=tuple(_with_log(run, attempt, seen) for seen in roll.ranks))
    return None


def _with_log(run: RunDir, attempt: int, seen: Observation) -> Observation:
    """Return an observation with the stack that a rank wrote when it was aborted."""
    if seen.frames or seen.pid is None:
        return seen
    lines = last_lines(run.log(seen.node, seen.via, "err", attempt), READ)
    if seen.worker:
        lines = own_lines(seen.rank, seen.local_rank, lines)
    frames = stack_in(lines) if any(ABORTED in line for line in lines) else ()
    return replace(seen, frames=frames, unseen="") if frames else seen


def with_blame(run: RunDir, attempt: int, state: RunState) -> RunState:
    """Return the state of an attempt that hung with the rank that its roll call blames as the first failure."""
    failure = state.failure
    if failure is None or failure.hang is None:
        return state
    roll = read_roll(run, attempt)
    if roll is None or not roll.ranks:
        return state
    verdict = judge(roll.ranks, roll.seconds)
    first = next(iter(verdict.blamed), None)
    failure = replace(
        failure, stands=verdict.sentence, unseen="; ".join(verdict.unseen), odd=first is not None
    )
    if first is None:
        return replace(state, failure=failure)
    failure = _as_failure(failure, first, state)
    ranks = tuple(
        replace(rank, hang=failure.hang, silent=failure.silent, stopped=failure.stopped)
        if (rank.node, rank.rank) == (failure.node, failure.rank)
        else replace(rank, hang=None, silent=False, stopped=False)
        for rank in state.ranks
    )
    return replace(state, failure=failure, ranks=ranks)


def _as_failure(failure: RankState, blamed: Observation, state: RunState) -> RankState:
    """Return the failure of a hang with the rank that is to blame."""
    known = next((rank for rank in state.ranks if (rank.node, rank.rank) == (blamed.node, blamed.via)), None)
    return replace(
        failure,
        rank=blamed.via,
        node=blamed.node,
        device=blamed.device,
        local_rank=known.local_rank if known else None,
        pid=known.pid if known else None,
        worker=blamed.rank if blamed.worker else None,
        step=blamed.step if blamed.step is not None else failure.step,
        stopped=blamed.state == STOPPED,
    )
