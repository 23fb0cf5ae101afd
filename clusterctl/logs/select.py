"""Select lines of logs: by rank, node and text, with lines of the same rank around them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from clusterctl.errors import UsageError
from clusterctl.logs.lines import LogChunk, LogLine


def parse_ranks(text: str) -> frozenset[int]:
    """Return the ranks of a text such as `0,8-15`."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", part)
        if (
            not match
            or int(match[2] or match[1]) < int(match[1])
            or int(match[2] or 0) - int(match[1]) > 1_000_000
        ):
            raise UsageError(f"--rank {text}: {part!r} is not a rank", "for example --rank 0,8-15")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


@dataclass(frozen=True)
class LogFilter:
    """The lines to show; by default all of rank 0, and the error lines of every rank."""

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    grep: re.Pattern[str] | None = None
    errors_only: bool = False
    exclude: re.Pattern[str] | None = None
    everybody: bool = False
    """All lines of all ranks, if no ranks were chosen."""
    before: int = 0
    """How many lines of the same rank to show before one that matches, and `after` it."""
    after: int = 0

    def wants(self, line: LogLine) -> bool:
        if not self.may_want(line.node, line.rank):
            return False
        if self.errors_only and not line.is_error:
            return False
        if self.grep is not None and not self.grep.search(line.text):
            return False
        if self.exclude is not None and self.exclude.search(line.text):
            return False
        return not self._only_errors_of(line.rank) or line.is_error

    def wants_all(self, chunk: LogChunk) -> bool:
        """Return True if all lines of a chunk are shown, so that none has to be examined."""
        searches = self.errors_only or self.grep is not None or self.exclude is not None
        return self.may_want(chunk.node, chunk.rank) and not searches and not self._only_errors_of(chunk.rank)

    def wants_none(self, chunk: LogChunk) -> bool:
        """Return True if no line of a chunk is shown, so that none has to be examined."""
        if not self.may_want(chunk.node, chunk.rank):
            return True
        if self.before or self.after:
            return False
        errors = self.errors_only or self._only_errors_of(chunk.rank)
        return errors and not chunk.may_hold_errors()

    def may_want(self, node: str, rank: int) -> bool:
        """Return whether lines of a rank may be shown."""
        if self.nodes is not None and node not in self.nodes:
            return False
        return self.ranks is None or rank in self.ranks

    def _only_errors_of(self, rank: int) -> bool:
        chosen = self.ranks is not None or self.nodes is not None or self.grep is not None
        return rank != 0 and not chosen and not self.everybody


class Selection:
    """The lines that a filter wants, as they come."""

    def __init__(self, wanted: LogFilter) -> None:
        self.wanted = wanted
        self._before: dict[tuple[str, int], deque[LogLine]] = {}
        # By rank, how many more lines belong to the last match.
        self._after: dict[tuple[str, int], int] = {}

    def of(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the wanted lines among these, and those around them."""
        wanted = self.wanted
        if not (wanted.before or wanted.after):
            yield from (line for line in lines if wanted.wants(line))
            return
        for line in lines:
            rank = (line.node, line.rank)
            if not wanted.may_want(*rank):
                continue
            passed = self._before.setdefault(rank, deque(maxlen=wanted.before))
            if wanted.wants(line):
                yield from passed
                passed.clear()
                self._after[rank] = wanted.after
                yield line
            elif self._after.get(rank, 0):
                self._after[rank] -= 1
                yield line
            else:
                passed.append(line)


def last_of(chunks: Iterable[LogChunk], wanted: LogFilter, count: int) -> Iterable[LogLine]:
    """Return the last lines that a filter wants."""
    selection = Selection(wanted)
    return deque((line for chunk in chunks for line in selection.of(chunk.lines())), maxlen=count)
