"""Tensors that are read on use, so that a conversion never has more than one of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]
# The types of tensors by their names in options of imports and exports.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 16 << 20
"""How many bytes of rows are converted at a time."""


@dataclass(frozen=True)
class Lazy:
    """A tensor of at least one dimension; `read(start, stop)` returns its rows [start, stop)."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    at_once: bool = False
    """Whether reading a few rows costs as much as reading all."""

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def whole(self) -> Tensor:
        return self.read(0, self.rows)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in order, about BLOCK bytes at a time."""
        step = max(1, BLOCK // max(1, self.row_bytes))
        if self.at_once:
            yield from self.whole().split(step)
            return
        for start in range(0, self.rows, step):
            yield self.read(start, min(self.rows, start + step))


def in_memory(tensor: Tensor) -> Lazy:
    """Return a tensor that is already in memory as a Lazy."""
    return Lazy(tuple(tensor.shape), tensor.dtype, lambda start, stop: tensor[start:stop])


def read_once(parts: Sequence[Lazy], build: Callable[[Sequence[Lazy]], Lazy]) -> Lazy:
    """Return `build(parts)`, which may take many ranges of rows; a part that is read at once is read only once."""
    if not any(part.at_once for part in parts):
        return build(parts)

    def read(start: int, stop: int) -> Tensor:
        held = [in_memory(part.whole()) if part.at_once else part for part in parts]
        return build(held).read(start, stop)

    return Lazy(build(parts).shape, parts[0].dtype, read, at_once=True)


def zeros(shape: Shape, dtype: torch.dtype) -> Lazy:
    """Return a tensor of zeros."""
    return Lazy(shape, dtype, lambda start, stop: torch.zeros((stop - start, *shape[1:]), dtype=dtype))


def rows_of(inner: Lazy, first: int, last: int) -> Lazy:
    """Return the rows [first, last) as a tensor."""
    shape = (last - first, *inner.shape[1:])
    return Lazy(
        shape, inner.dtype, lambda start, stop: inner.read(first + start, first + stop), inner.at_once
    )


def stacked(parts: Sequence[Lazy]) -> Lazy:
    """Return the rows of all parts, concatenated."""
    if len(parts) == 1:
        return parts[0]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.rows)

    def read(start: int, stop: int) -> Tensor:
        found = [
            part.read(max(start, begin) - begin, min(stop, end) - begin)
            for part, begin, end in zip(parts, ends, ends[1:], strict=False)
            if max(start, begin) < min(stop, end)
        ]
        if len(found) > 1:
            return torch.cat(found)
        return found[0] if found else parts[0].read(0, 0)

    shape = (ends[-1], *parts[0].shape[1:])
    return Lazy(shape, parts[0].dtype, read, any(part.at_once for part in parts))


def together(parts: Sequence[Lazy]) -> Lazy:
    """Return tensors of one shape stacked along a new first dimension; each can be read separately."""

    def read(start: int, stop: int) -> Tensor:
        return torch.stack([part.whole() for part in parts[start:stop]])

    return Lazy((len(parts), *parts[0].shape), parts[0].dtype, read)


def one_of(inner: Lazy, at: int) -> Lazy:
    """Return the tensor at index `at` of the first dimension."""

    def read(start: int, stop: int) -> Tensor:
        return inner.read(at, at + 1)[0][start:stop]

    return Lazy(inner.shape[1:], inner.dtype, read, at_once=True)


def side_by_side(parts: Sequence[Lazy]) -> Lazy:
    """Return the columns of all parts, concatenated."""
    if len(parts) == 1:
        return parts[0]
    shape = (parts[0].rows, sum(part.shape[1] for part in parts), *parts[0].shape[2:])
    at_once = any(part.at_once for part in parts)
    return Lazy(
        shape,
        parts[0].dtype,
        lambda start, stop: torch.cat([part.read(start, stop) for part in parts], 1),
        at_once,
    )


def columns_of(inner: Lazy, first: int, last: int) -> Lazy:
    """Return the columns [first, last) as a tensor."""
    shape = (inner.rows, last - first, *inner.shape[2:])
    return Lazy(
        shape,
        inner.dtype,
        lambda start, stop: inner.read(start, stop)[:, first:last].contiguous(),
        inner.at_once,
    )


def transposed(inner: Lazy) -> Lazy:
    """Return the transpose of a matrix, or of each of several matrices."""
    if len(inner.shape) == 3:
        count, rows, columns = inner.shape
        return of_each(inner, (count, columns, rows), lambda block: block.transpose(1, 2).contiguous())
    rows, columns = inner.shape
    return Lazy(
        (columns, rows),
        inner.dtype,
        lambda start, stop: inner.whole().t()[start:stop].contiguous(),
        at_once=True,
    )


def of_each(inner: Lazy, shape: Shape, change: Callable[[Tensor], Tensor]) -> Lazy:
    """Return what `change` makes of rows, each for itself; `shape`: the result's."""
    return Lazy(shape, inner.dtype, lambda start, stop: change(inner.read(start, stop)), inner.at_once)


def reshaped(inner: Lazy, shape: Shape) -> Lazy:
    """Return the same numbers with another shape."""
    return Lazy(
        shape, inner.dtype, lambda start, stop: inner.whole().reshape(shape)[start:stop], at_once=True
    )


def shaped(flat: Lazy, shape: Shape, dtype: torch.dtype | None = None) -> Lazy:
    """Return a row of numbers, or of their bytes, as a tensor whose rows can be read separately."""
    shape, dtype = shape or (1,), dtype or flat.dtype
    each = prod(shape[1:]) * dtype.itemsize // flat.dtype.itemsize

    def read(start: int, stop: int) -> Tensor:
        return flat.read(start * each, stop * each).view(dtype).view(stop - start, *shape[1:])

    return Lazy(shape, dtype, read)


def cast(inner: Lazy, dtype: torch.dtype) -> Lazy:
    """Return the same numbers in another type."""
    if dtype == inner.dtype:
        return inner
    return Lazy(inner.shape, dtype, lambda start, stop: inner.read(start, stop).to(dtype), inner.at_once)


def padded(inner: Lazy, rows: int) -> Lazy:
    """Return the tensor followed by rows of zeros, `rows` rows in total."""
    if rows == inner.rows:
        return inner
    return stacked([inner, zeros((rows - inner.rows, *inner.shape[1:]), inner.dtype)])


@dataclass(frozen=True)
class NamedState:
    """The tensors of one tensor parallel rank under another program's names: weights and their averages."""

    weights: Mapping[str, Lazy]
    moments: Mapping[str, Mapping[str, Lazy]] = field(default_factory=dict)
    """`exp_avg` and `exp_avg_sq`, or empty."""
