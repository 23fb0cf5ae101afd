"""The silence of a program that tells no steps: it counts only where the job says how long is too long.

Most programs log on one rank alone, so that a silent rank says nothing; that all of them are silent does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

LATER = 3.0  # seconds more than a node takes that sees by heartbeats, or by a stopped process, which rank it is


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
