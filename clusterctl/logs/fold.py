"""Show a line that many ranks wrote only once, in the order of the first rank that wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from clusterctl.logs.lines import LogChunk
from clusterctl.logs.select import LogFilter

# Limit of different lines in memory; at the limit they are yielded, and folding starts again.
MOST = 1_000_000
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass
class Folded:
    """A line, the ranks that wrote it, and how often they wrote it together."""

    text: str
    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    times: int = 0
    before: Folded | None = None
    after: Folded | None = None


def fold_lines(
    chunks: Iterable[LogChunk], wanted: LogFilter, *, fuzzy: bool = False, most: int = MOST
) -> Iterator[Folded]:
    """Yield each line once.

    A line that only some ranks wrote is shown at its position between the lines that they share with others.
    """
    fold = _Fold(fuzzy)
    for chunk in chunks:
        fold.take(chunk, wanted)
        if len(fold.known) >= most:
            yield from fold.lines()
            fold = _Fold(fuzzy)
    yield from fold.lines()


class _Fold:
    """A chain of lines in the order in which they are shown.

    A new line waits for the next line of its rank that is in the chain already, and is inserted before that one: so
    lines that differ from rank to rank are shown together, in the order of the ranks.
    """

    def __init__(self, fuzzy: bool) -> None:
        self.fuzzy = fuzzy
        self.head = self.tail = Folded("")
        self.known: dict[str, Folded] = {}
        self.waiting: list[Folded] = []
        self.stream = (-1, "")

    def take(self, chunk: LogChunk, wanted: LogFilter) -> None:
        if self.stream != (chunk.rank, chunk.stream):
            self._insert(None)
            self.stream = (chunk.rank, chunk.stream)
        for line in chunk.lines():
            if not wanted.wants(line):
                continue
            key = NUMBER.sub("#", line.text) if self.fuzzy else line.text
            entry = self.known.get(key)
            if entry is None:
                entry = self.known[key] = Folded(line.text)
                self.waiting.append(entry)
            elif entry.text != line.text:
                entry.text = key
            # A line that this rank wrote before would create a cycle.
            if entry.before and chunk.rank not in entry.ranks:
                self._insert(entry)
            entry.ranks.add(chunk.rank)
            entry.nodes.add(chunk.node)
            entry.times += 1

    def _insert(self, after: Folded | None) -> None:
        before = after.before if after and after.before else self.tail
        for entry in self.waiting:
            before.after, entry.before = entry, before
            before = entry
        before.after = after
        if after:
            after.before = before
        else:
            self.tail = before
        self.waiting = []

    def lines(self) -> Iterator[Folded]:
        self._insert(None)
        entry = self.head.after
        while entry is not None:
            yield entry
            entry = entry.after


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in the form `0-7,9`, as `--rank` takes them."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)
