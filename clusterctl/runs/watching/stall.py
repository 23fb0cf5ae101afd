"""Detect runs that make no progress: silent programs and stragglers.

Silence: a program without heartbeats counts as hung if no rank writes output for as long as the job allows. One silent
rank alone means nothing, since most programs write on one rank only.

Stragglers: ranks that make the others wait. All ranks take the same time for a step, because they wait for the slowest;
a trainer's heartbeat therefore holds the rank's own time, without waiting. Stragglers are named once and never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.runs.decide.attempt import Hang

if TYPE_CHECKING:
    from clusterctl.jobs.record import RunRecord

# Seconds that nodes have to detect the hang first: heartbeats or a stopped process show them which rank it is.
LATER = 3.0
# Seconds of silence of all ranks that are reported.
NOTICES = (60.0, 600.0, 3600.0)


class Silence:
    """Measures how long no rank has written output. Its methods may be called from several threads."""

    def __init__(self, record: RunRecord, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = record.job.hang_after if record.job.train is None else None
        # How long a silence is when it is reported next; the trainer's own runs may be silent.
        self._notices = NOTICES if record.job.command else ()
        self._noticed = 0.0
        self._ranks: Mapping[str, Collection[int]] = record.ranks
        self._clock = clock
        self._last = clock(), "", -1
        # Whether only steps end the silence.
        self._by_step = False

    def broken_by(self, node: str, rank: int) -> None:
        """Record output of a rank; after the first reported step, other output does not count."""
        if not self._by_step:
            self._last = self._clock(), node, rank

    def stepped(self, node: str, rank: int, *, finished: bool) -> None:
        """Record a step in the output of a rank; after the last step, any output counts again."""
        self._by_step = not finished
        self._last = self._clock(), node, rank

    def has_heartbeats(self) -> None:
        """Record that the program writes heartbeats: its nodes then detect a hang, and its logs may be silent."""
        self._limit, self._notices = None, ()

    @property
    def last(self) -> str:
        """The rank that wrote last, for a message."""
        _, node, rank = self._last
        return f" (rank {rank} on {node} was the last)" if rank >= 0 else ""

    def notice(self, ended: Collection[str]) -> float | None:
        """Return the seconds of a silence that must be reported now, or None; each length is reported once."""
        silent = self._clock() - self._last[0]
        left = any(ranks and name not in ended for name, ranks in self._ranks.items())
        due = max((seconds for seconds in self._notices if seconds <= silent), default=0.0)
        before, self._noticed = self._noticed, due
        return silent if left and due > before else None

    def hang(self, ended: Collection[str]) -> Hang | None:
        """Return the hang if the ranks that still run were silent for too long, else None."""
        since, node, rank = self._last
        silent = self._clock() - since
        left = [name for name, ranks in self._ranks.items() if ranks and name not in ended]
        if not self._limit or silent <= self._limit + LATER or not left:
            return None
        if node not in left or rank < 0:
            node, rank = left[0], min(self._ranks[left[0]])
        return Hang(node, rank, round(silent, 1))


# A straggler takes at least this many times the median.
MUCH = 1.3
# A straggler takes at least this many seconds more than the median.
LEAST = 0.005
# A straggler was slow in this many reports in a row; reports are about 10 s apart.
IN_A_ROW = 3


def is_number(value: object) -> bool:
    """Return True if a value can be a number of seconds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def slow(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return by slow rank how many times as long as the median it takes; of two ranks, the faster is the median."""
    if len(seconds) < 2:
        return {}
    # The module `statistics` would take a controller most of a megabyte.
    usual = sorted(seconds.values())[(len(seconds) - 1) // 2]
    if usual <= 0:
        return {}
    return {
        rank: entry / usual
        for rank, entry in seconds.items()
        if entry > MUCH * usual and entry - usual > LEAST
    }


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow several times in a row."""

    rank: int
    times: float
    seconds: float
    usual: float

    def describe(self, node: str, device: object) -> str:
        where = f"rank {self.rank} on {node} (device {device})"
        return (
            f"straggler: {where} takes {self.times:.1f} times as long for its part of a step as the others"
            f" ({self.seconds:.3g} s, they {self.usual:.3g} s)"
        )


@dataclass
class Stragglers:
    """Collects the reports of one attempt's nodes and reports each straggler once."""

    ranks: int
    last: dict[int, float] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    in_a_row: dict[int, int] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)

    def note(self, seconds: Mapping[int, float]) -> list[Straggler]:
        """Take one node's report; return new stragglers once every rank was reported again."""
        self.last.update(seconds)
        self.fresh.update(seconds)
        if len(self.fresh) < self.ranks:
            return []
        self.fresh.clear()
        result = slow(self.last)
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in result}
        fresh = [rank for rank in result if self.in_a_row[rank] >= IN_A_ROW and rank not in self.named]
        self.named.update(fresh)
        return [
            Straggler(rank, result[rank], self.last[rank], self.last[rank] / result[rank]) for rank in fresh
        ]
