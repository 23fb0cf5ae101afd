"""The silence of a program that tells no steps: it counts only where the job says how long is too long.

Most programs log on one rank alone, so that a silent rank says nothing; that all of them are silent does.

Ranks that hold up the others: told by what each takes for a step itself, named once, never stopped.

Ranks in step take the same time for one, since all wait for the slowest; so a trainer's heartbeat tells what the rank
itself took, without its waiting. Of a program that tells steps alone, these count.

A launcher that hears no node at all: whose link is gone, theirs or its own?
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.inventory.cluster import Node

if TYPE_CHECKING:
    from clusterctl.transport.fanout import Connections


LATER = (
    # Seconds more than a node takes that sees by heartbeats, or by a stopped process, which rank it is.
    3.0
)


@dataclass(frozen=True)
class Hang:
    """All ranks were silent for too long; the one that was heard last stands for them."""

    node: str
    rank: int
    seconds: float

    def as_failure(self) -> dict[str, Any]:
        """What its node records of it."""
        return {"rank": self.rank, "hang": self.seconds, "silent": True}


class Silence:
    """How long nothing has come of any rank; asked and told from several threads, a word each."""

    def __init__(self, record: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        job = record["job"]
        self._limit = job.get("hang_after") if job.get("train") is None else None
        self._ranks: Mapping[str, Collection[int]] = record["ranks"]
        self._clock = clock
        self._heard = clock(), "", -1

    def broken_by(self, node: str, rank: int) -> None:
        """Something came of a rank."""
        self._heard = self._clock(), node, rank

    def steps_are_told(self) -> None:
        """The program has a heartbeat, by which its nodes judge; its logs may be silent."""
        self._limit = None

    def hang(self, ended: Collection[str]) -> Hang | None:
        """Whether the ranks that have not ended have been silent for too long."""
        since, node, rank = self._heard
        silent = self._clock() - since
        left = [name for name, ranks in self._ranks.items() if ranks and name not in ended]
        if not self._limit or silent <= self._limit + LATER or not left:
            return None
        if node not in left or rank < 0:
            node, rank = left[0], min(self._ranks[left[0]])
        return Hang(node, rank, round(silent, 1))


# Times the median.
MUCH = 1.3
# Seconds more than it: less is no matter.
LEAST = 0.005
# Words of its node, some 10 s apart: a rank that had bad luck once is none.
IN_A_ROW = 3


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
        return [
            Straggler(rank, found[rank], self.last[rank], self.last[rank] / found[rank]) for rank in fresh
        ]


# Seconds between two askings of the nodes that stand by.
AGAIN = 2.0


class Outage:
    """While no node of a run answers, those that stand by are asked: if none does either, the link is our own."""

    def __init__(self, connections: Connections, spares: Sequence[Node]) -> None:
        self.connections, self.spares = connections, list(spares)
        self.asking: threading.Thread | None = None
        self.answered = False
        self.again = 0.0

    def is_ours(self) -> bool:
        """Whether nobody is known to answer; the asking itself goes on in a thread, since it may take 10 s."""
        under_way = self.asking is not None and self.asking.is_alive()
        if self.spares and not self.answered and not under_way and time.monotonic() > self.again:
            self.asking = threading.Thread(target=self._ask, daemon=True, name="ask spares")
            self.asking.start()
        return not self.answered

    def over(self) -> None:
        """A node answers: the next outage is another one."""
        self.answered = False

    def _ask(self) -> None:
        outcomes = self.connections.on_each(self.spares, lambda node, link: link.call("hello"))
        for outcome in outcomes:
            if not outcome.ok:
                self.connections.drop(outcome.node)
        self.answered = any(outcome.ok for outcome in outcomes)
        self.again = time.monotonic() + AGAIN
