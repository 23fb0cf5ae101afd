"""Products of groups of rows, each with its own matrix, on CUDA: one launch, no synchronization for the group sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from native.cuda import language
from native.cuda.language import jit, on_device, register, tl
from native.gradients import grouped_linear_op
from native.reference import grouped_linear as plain

# The rows and columns of a program's result, and how many inner numbers it handles at a time.
ROWS, COLUMNS, INNER = 64, 64, 32

METHOD = "all groups in one launch"


def _sizes(x: Tensor) -> dict[str, int]:
    """Return the sizes of a program; with four warps, or with more of fp32 at a time, some devices spill registers."""
    inner = INNER // 2 if x.dtype == torch.float32 else INNER
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": inner, "num_warps": 8}


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of each group times the transpose of its matrix."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x, weight = (each.to(torch.get_autocast_dtype(device)) for each in (x, weight))
    if x.dtype != weight.dtype or not language.computes("grouped_linear", x):
        return plain(x, weight, counts)
    result: Tensor = _FORWARD(x, weight, F.pad(counts.to(x.device).cumsum(0), (1, 0)))
    return result


@jit
def _row_products(
    x_at: tl.tensor, matrix_at: tl.tensor, bounds_at: tl.tensor, out_at: tl.tensor, groups: tl.tensor,
    width: tl.tensor, inner: tl.tensor, x_row: tl.tensor, x_column: tl.tensor, matrix_group: tl.tensor,
    matrix_row: tl.tensor, matrix_column: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:  # fmt: skip
    # Find the group of this program's rows: each group has as many programs as it needs; the last programs have none.
    left = tl.program_id(0)
    group = tl.zeros([], tl.int32)
    begin = tl.load(bounds_at)
    end = tl.load(bounds_at + 1)
    while (group < groups - 1) & (left >= tl.cdiv(end - begin, ROWS)):
        left -= tl.cdiv(end - begin, ROWS).to(tl.int32)
        group += 1
        begin = end
        end = tl.load(bounds_at + group + 1)
    if begin + left * ROWS < end:
        row = begin + left * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        lane = tl.arange(0, INNER)
        from_row = x_at + row[:, None] * x_row
        from_column = (
            matrix_at + group.to(tl.int64) * matrix_group + column[None, :].to(tl.int64) * matrix_column
        )
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inner, INNER):
            at = (start + lane).to(tl.int64)
            known = at < inner
            x = tl.load(from_row + at[None, :] * x_column, (row[:, None] < end) & known[None, :], 0.0)
            matrix = tl.load(
                from_column + at[:, None] * matrix_row, known[:, None] & (column[None, :] < width), 0.0
            )
            total = tl.dot(x, matrix, total, input_precision="ieee")
        inside = (row[:, None] < end) & (column[None, :] < width)
        tl.store(out_at + row[:, None] * width + column[None, :], total.to(out_at.dtype.element_ty), inside)


@jit
def _matrix_products(
    above_at: tl.tensor, x_at: tl.tensor, bounds_at: tl.tensor, out_at: tl.tensor, outputs: tl.tensor,
    inputs: tl.tensor, above_row: tl.tensor, above_column: tl.tensor, x_row: tl.tensor, x_column: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(2).to(tl.int64)
    begin = tl.load(bounds_at + group)
    end = tl.load(bounds_at + group + 1)
    output = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    lane = tl.arange(0, INNER)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, INNER):
        row = start + lane
        known = row < end
        above = tl.load(
            above_at + row[None, :] * above_row + output[:, None] * above_column,
            known[None, :] & (output[:, None] < outputs),
            0.0,
        )
        x = tl.load(
            x_at + row[:, None] * x_row + column[None, :] * x_column,
            known[:, None] & (column[None, :] < inputs),
            0.0,
        )
        total = tl.dot(above, x, total, input_precision="ieee")
    out_at += (group * outputs + output[:, None]) * inputs + column[None, :]
    inside = (output[:, None] < outputs) & (column[None, :] < inputs)
    tl.store(out_at, total.to(out_at.dtype.element_ty), inside)


def _rows(x: Tensor, matrices: Tensor, bounds: Tensor) -> Tensor:
    """Return the rows of each group times its matrix (inputs, outputs)."""
    groups, inner, width = matrices.shape
    out = x.new_empty(len(x), width)
    given = (x, matrices, bounds, out, groups, width, inner, *x.stride(), *matrices.stride())
    if out.numel():
        # A group may begin in the middle of a program's rows.
        grid = (-(-len(x) // ROWS) + groups, -(-width // COLUMNS))
        with on_device(x):
            _row_products[grid](*given, **_sizes(x))
    return out


def _matrices(upstream: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    """Return the transpose of each group's `upstream` times its rows of `x`, (groups, outputs, inputs)."""
    outputs, inputs = upstream.shape[1], x.shape[1]
    out = x.new_empty(len(bounds) - 1, outputs, inputs)
    given = (upstream, x, bounds, out, outputs, inputs, *upstream.stride(), *x.stride())
    if out.numel():
        grid = (-(-outputs // ROWS), -(-inputs // COLUMNS), len(bounds) - 1)
        with on_device(x):
            _matrix_products[grid](*given, **_sizes(x))
    return out


def _forward(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    return _rows(x, weight.transpose(1, 2), bounds)


def _backward(
    upstream: Tensor, x: Tensor, weight: Tensor, bounds: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    first = _rows(upstream, weight, bounds) if of_x else x.new_empty(0)
    return first, _matrices(upstream, x, bounds) if of_weight else x.new_empty(0)


_FORWARD = grouped_linear_op(register, _forward, _backward)
