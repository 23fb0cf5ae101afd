"""The order of rows in other programs' matrices of queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import torch

from trainer.config.attention import Heads
from trainer.weights.lazy import Lazy, of_each, read_once, rows_of, stacked


class Rows(Enum):
    """The order of rows in another program's projection to queries, keys and values."""

    SECTIONS = "all queries, all keys, all values"
    GROUPS = "for each group its queries, its key, its value"
    NUMBERS = "for each head, for each of its numbers, query, key, value"
    PAIRS = "of each expert, a row of the gate before one of the other half"


def order_of(ours: str, rows: Rows = Rows.GROUPS) -> Rows:
    """Return the order of one of our tensors in a program that has queries, keys and values in the order `rows`."""
    return rows if ".attention.qkv." in ours else Rows.SECTIONS


def in_sections(theirs: Lazy, rows: Rows, heads: Heads) -> Lazy:
    """Return rows in sections of queries, keys and values; `rows`: their present order."""
    if rows is Rows.GROUPS:
        runs = [(theirs, size) for _, theirs, size in sorted(_runs(heads))]
        return read_once([theirs], lambda parts: _joined(parts[0], runs))
    if rows is Rows.PAIRS:
        return of_each(theirs, theirs.shape, lambda block: torch.cat([block[:, ::2], block[:, 1::2]], 1))
    return _permuted(theirs, heads) if rows is Rows.NUMBERS else theirs


def from_sections(ours: Lazy, rows: Rows, heads: Heads) -> Lazy:
    """Return rows in groups, or in the order that they have; they are in sections of queries, keys and values."""
    if rows is Rows.PAIRS:
        return of_each(ours, ours.shape, lambda block: torch.stack(block.chunk(2, 1), 2).flatten(1, 2))
    runs = [(ours, size) for ours, _, size in _runs(heads)]
    return read_once([ours], lambda parts: _joined(parts[0], runs)) if rows is Rows.GROUPS else ours


def _runs(heads: Heads) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of rows in the order of groups: their first row in sections and in groups, and their number."""
    size, queries = heads.size, heads.width // heads.groups
    for group in range(heads.groups):
        first = group * (queries + 2 * size)
        yield group * queries, first, queries
        yield heads.width + group * size, first + queries, size
        yield heads.width + heads.keys + group * size, first + queries + size, size


def _joined(whole: Lazy, runs: list[tuple[int, int]]) -> Lazy:
    return stacked([rows_of(whole, first, first + size) for first, size in runs])


def _permuted(theirs: Lazy, heads: Heads) -> Lazy:
    """Return rows in sections, given rows in which the query, key and value of a number are adjacent."""
    order = torch.arange(3 * heads.keys).view(heads.groups, heads.size, 3).permute(2, 0, 1).reshape(-1)
    return Lazy(
        theirs.shape, theirs.dtype, lambda start, stop: theirs.whole()[order[start:stop]], at_once=True
    )
