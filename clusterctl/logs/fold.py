"""The same line of many ranks, said once: in the order of the first rank that said it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from clusterctl.logs.lines import LogChunk
from clusterctl.logs.store import LogFilter

# Different lines in memory; then what there is so far is given, and folding begins anew.
MOST = 1_000_000
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass
class Folded:
    """A line, the ranks that said it, and how often they said it in all."""

    text: str
    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    times: int = 0
    before: Folded | None = None
    after: Folded | None = None


def fold_lines(
    chunks: Iterable[LogChunk], wanted: LogFilter, *, fuzzy: bool = False, most: int = MOST
) -> Iterator[Folded]:
    """Each line once. What only some ranks said stands where they said it, between the lines that they share
    with the others."""
    fold = _Fold(fuzzy)
    for chunk in chunks:
        fold.take(chunk, wanted)
        if len(fold.known) >= most:
            yield from fold.lines()
            fold = _Fold(fuzzy)
    yield from fold.lines()


class _Fold:
    """A chain of lines. What a rank says and nobody said before waits for the next line that is there already, and
    is put before that: so lines that differ from rank to rank stand together, in the ranks' order."""

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
            one = self.known.get(key)
            if one is None:
                one = self.known[key] = Folded(line.text)
                self.waiting.append(one)
            elif one.text != line.text:
                one.text = key
            # A line said again would lead back.
            if one.before and chunk.rank not in one.ranks:
                self._insert(one)
            one.ranks.add(chunk.rank)
            one.nodes.add(chunk.node)
            one.times += 1

    def _insert(self, after: Folded | None) -> None:
        place = after.before if after and after.before else self.tail
        for one in self.waiting:
            place.after, one.before = one, place
            place = one
        place.after = after
        if after:
            after.before = place
        else:
            self.tail = place
        self.waiting = []

    def lines(self) -> Iterator[Folded]:
        self._insert(None)
        one = self.head.after
        while one is not None:
            yield one
            one = one.after


def ranks_text(ranks: Iterable[int]) -> str:
    """`0-7,9`, as `--rank` takes it."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)
