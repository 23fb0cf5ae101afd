"""Ranks that hold up the others: told by what each takes for a step itself, named once, never stopped.

Ranks in step take the same time for one, since all wait for the slowest; so a trainer's heartbeat tells what the rank
itself took, without its waiting. Of a program that tells steps alone, these count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

MUCH = 1.3  # times the median
LEAST = 0.005  # seconds more than it: less is no matter
IN_A_ROW = 3  # words of its node, some 10 s apart: a rank that had bad luck once is none


def is_number(value: object) -> bool:
    """Whether it can be seconds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def slow(seconds: Mapping[int, float]) -> dict[int, float]:
    """By rank that is much slower than the median: how many times as long it takes. Of two ranks the quicker counts."""
    if len(seconds) < 2:
        return {}
    usual = statistics.median_low(seconds.values())
    if usual <= 0:
        return {}
    return {rank: one / usual for rank, one in seconds.items() if one > MUCH * usual and one - usual > LEAST}


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow again and again."""

    rank: int
    times: float
    seconds: float
    usual: float

    def words(self, node: str, device: object) -> str:
        where = f"rank {self.rank} on {node} (device {device})"
        return (
            f"straggler: {where} takes {self.times:.1f} times as long for its part of a step as the others"
            f" ({self.seconds:.3g} s, they {self.usual:.3g} s)"
        )


@dataclass
class Stragglers:
    """What the nodes of one attempt said so far; each straggler is told once."""

    ranks: int
    last: dict[int, float] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    in_a_row: dict[int, int] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)

    def note(self, said: Mapping[int, float]) -> list[Straggler]:
        """One node's word; judged when every rank has been heard of again."""
        self.last.update(said)
        self.fresh.update(said)
        if len(self.fresh) < self.ranks:
            return []
        self.fresh.clear()
        found = slow(self.last)
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in found}
        fresh = [rank for rank in found if self.in_a_row[rank] >= IN_A_ROW and rank not in self.named]
        self.named.update(fresh)
        return [Straggler(rank, found[rank], self.last[rank], self.last[rank] / found[rank]) for rank in fresh]
