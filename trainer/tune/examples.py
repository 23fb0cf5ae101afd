"""Token ids of examples, and rows to train on: examples one after another, or packed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.evaluate.rows import check_faults
from trainer.tune.conversations import Marked

# Marks targets that do not count, and samples that only fill up the last batch; the same as in trainer.model.masks,
# which needs torch.
UNCOUNTED = -100
# How many texts are encoded at a time.
GROUP = 4096


@dataclass(frozen=True)
class Examples:
    """Token ids of examples, one after another, and whether each id is learned (or the value of `Adjust`)."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.int16]
    ends: NDArray[np.int64]
    """The end of each example; the first entry is 0."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return how many tokens the model reads of each example: all but the last."""
        return np.diff(self.ends) - 1

    def row(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of an example and their targets."""
        begin, end = self.ends[number], self.ends[number + 1]
        tokens = self.tokens[begin:end].astype(np.int64)
        targets = np.where(self.learned[begin + 1 : end] != 0, tokens[1:], UNCOUNTED)
        return tokens[:-1], targets


def encoded(texts: Sequence[Marked], tokenizer: Tokenizer, eod: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each text its ids, and for each id 1 if it contains a learned character, else 0."""
    for start in range(0, len(texts), GROUP):
        group = texts[start : start + GROUP]
        for marked, (ids, offsets) in zip(
            group, tokenizer.encode_with_offsets([each.text for each in group]), strict=True
        ):
            learned, spans = [], list(marked.spans)
            for begin, end in offsets:
                while spans and spans[0][1] <= begin:
                    spans.pop(0)
                learned.append(int(bool(spans) and end > spans[0][0]))
            yield ([*ids, eod], [*learned, 1]) if marked.ends else (ids, learned)


Adjust = Callable[[Marked, list[int], list[int]], tuple[list[int], list[int]]]
"""Takes the ids of a text and their learned marks; returns the ids, and a value to record for each id."""


@dataclass(frozen=True)
class Limits:
    """How to handle texts of more than `longest` + 1 tokens."""

    longest: int
    too_long: str = "refuse"
    """One of refuse, cut and leave_out."""


def examples_of(
    file: Path,
    texts: Sequence[Marked],
    tokenizer: Tokenizer,
    eod: int,
    limits: Limits,
    adjust: Adjust | None = None,
) -> Examples:
    """Return the examples of texts; without `adjust` each text needs a learned token."""
    tokens, learned, ends, faults = list[int](), list[int](), [0], list[str]()
    most = limits.longest + 1
    for marked, (ids, own) in zip(texts, encoded(texts, tokenizer, eod), strict=True):
        if adjust is not None:
            ids, own = adjust(marked, ids, own)
        if len(ids) > most and limits.too_long == "leave_out":
            continue
        if len(ids) > most and limits.too_long == "refuse":
            faults.append(f"{file}:{marked.line}: has {len(ids)} tokens")
            continue
        cut = len(ids) > most
        ids, own = ids[:most], own[:most]
        if adjust is None and not any(own[1:]):
            problem = "no token of an answer is left" if cut else "has no token of an answer"
            faults.append(f"{file}:{marked.line}: {problem}")
        elif not ids:
            faults.append(f"{file}:{marked.line}: has no tokens")
        tokens += ids
        learned += own
        ends.append(len(tokens))
    remedy = (
        f"at most {most} tokens fit: raise model.sequence or set tune.too_long; each example needs an answer"
    )
    check_faults(faults, remedy)
    if len(ends) == 1:
        raise DataError(f"{file}: every example is too long", remedy)
    return Examples(np.array(tokens, np.int32), np.array(learned, np.int16), np.array(ends, np.int64))


def joined(
    rows: Sequence[tuple[NDArray[Any], NDArray[Any]]],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return tokens, targets and each token's example number for concatenated examples; all have shape (1, tokens)."""
    documents = np.repeat(np.arange(len(rows)), [len(tokens) for tokens, _ in rows])
    tokens, targets = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return tokens[None], targets[None], documents[None]


class JoinedExamples:
    """Each sample is an example; the examples of a micro-batch form one row without padding."""

    def __init__(self, examples: Examples, seed: int | None) -> None:
        """`seed`: with None the examples are read once, in the order of the file; further samples do not count."""
        self.examples, self.seed = examples, seed

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, numbers: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Return a micro-batch: tokens, targets and each token's example number, all (1, tokens)."""
        rows = []
        for number in numbers:
            at, counts = shuffled(number, len(self.examples), self.seed)
            tokens, targets = self.examples.row(at)
            rows.append((tokens, targets if counts else np.full_like(targets, UNCOUNTED)))
        return joined(rows)


class PackedExamples:
    """Each sample is a row of `length` tokens with several whole examples."""

    def __init__(self, examples: Examples, length: int, fill: int, seed: int | None) -> None:
        self.examples, self.length, self.fill, self.seed = examples, length, fill, seed
        self.rows = packed(examples.lengths.tolist(), length)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Return a micro-batch: tokens, targets and each token's example number, all (rows, length)."""
        shape = (len(numbers), self.length)
        tokens, targets = np.full(shape, self.fill, np.int64), np.full(shape, UNCOUNTED, np.int64)
        documents = np.zeros(shape, np.int64)
        for row, number in enumerate(numbers):
            at, counts = shuffled(number, len(self.rows), self.seed)
            end = 0
            for document, example in enumerate(self.rows[at]):
                begin, (own, wanted) = end, self.examples.row(example)
                end += len(own)
                tokens[row, begin:end], documents[row, begin:end] = own, document
                if counts:
                    targets[row, begin:end] = wanted
            documents[row, end:] = len(self.rows[at])
        return tokens, targets, documents


def shuffled(number: int, count: int, seed: int | None) -> tuple[int, bool]:
    """Return the index of a sample's entry among `count`, and whether it counts; each epoch has another order."""
    if seed is None:
        return min(number, count - 1), number < count
    epoch, at = divmod(number, count)
    return int(_order(seed & 0xFFFFFFFF, epoch, count)[at]), True


_orders: dict[tuple[int, int, int], NDArray[np.int64]] = {}


def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    key = (seed, epoch, count)
    if key not in _orders:
        if len(_orders) > 4:
            _orders.clear()
        _orders[key] = RandomState([seed, epoch]).permutation(count)
    return _orders[key]


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the examples in each row: the longest first, each in the fullest row with enough room."""
    rows, free = list[list[int]](), list[tuple[int, int]]()
    for number in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        place = bisect_left(free, (lengths[number], -1))
        if place == len(free):
            rows.append([])
            left, row = room, len(rows) - 1
        else:
            left, row = free.pop(place)
        rows[row].append(number)
        insort(free, (left - lengths[number], row))
    return rows
