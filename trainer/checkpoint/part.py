"""The interface between engines and checkpoints: the parts of tensors on a rank, by logical name and ranges.

A tensor's logical name and whole shape are the same in every layout. `tokens.weight` is a parameter in fp32;
`exp_avg.tokens.weight` and `exp_avg_sq.tokens.weight` are the averages of its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
# Half-open ranges, one for each dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A box of a logical tensor and this rank's memory for it; writing to `tensor` changes the training."""

    key: str
    shape: tuple[int, ...]
    """The shape of the whole logical tensor."""
    box: Box
    tensor: Tensor
    owned: bool = True
    """Whether this rank saves it: only one of several copies is saved. A load fills all copies."""


class HasParts(Protocol):
    """The methods of an engine that checkpoints need."""

    @property
    def optimizer_steps(self) -> int:
        """Return how many updates the optimizer has made."""

    def parts(self) -> list[Part]:
        """Return all of this rank's parts of weights and moments."""

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        """Let `fill` write all parts, then continue after `optimizer_steps` updates. Not a collective."""


def volume(box: Box) -> int:
    """Return how many numbers are in a box."""
    return math.prod(stop - start for start, stop in box)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def intersection(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that together are the numbers [start, stop) of a flattened tensor, in their order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start, stop),) if shape else ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _within_row(shape, start // row, start % row, stop - (start // row) * row)
        return
    if start < first * row:
        yield from _within_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield ((first, last), *whole_box(shape[1:]))
    if last * row < stop:
        yield from _within_row(shape, last, 0, stop - last * row)


def _within_row(shape: Sequence[int], at: int, start: int, stop: int) -> Iterator[Box]:
    yield from (((at, at + 1), *rest) for rest in flat_boxes(shape[1:], start, stop))
