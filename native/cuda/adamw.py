"""AdamW on CUDA: one pass over weight, gradient and moments, including clipping, loss scale and the bf16 copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, tl
from native.cuda.language import why_not as why_not
from native.fallback import report_fallback
from native.reference import adamw as plain
from native.update import AdamWStep

if TYPE_CHECKING:
    from torch import Tensor

    from native.update import Row


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return language.describe("one pass per tensor")


def adamw(update: AdamWStep) -> None:
    """Update the weights and moments in place."""
    rows = list(update.rows())
    remainders = update.remainders or [None] * len(rows)
    if not all(_computes(row, rest) for row, rest in zip(rows, remainders, strict=True)):
        plain(update)
        return
    for (weight, gradient, average, square, low, decay), rest in zip(rows, remainders, strict=True):
        count, blocks = weight.numel(), blocks_for(weight)
        if not count:
            continue
        with on_device(weight):
            _adamw[(-(-count // blocks.flat),)](
                weight,
                weight if rest is None else rest,
                gradient.contiguous(),
                average,
                square,
                weight if low is None else low,
                count,
                update.factor,
                1.0 - update.rate * decay,
                update.rate / (1.0 - update.betas[0] ** update.step),
                (1.0 - update.betas[1] ** update.step) ** -0.5,
                update.betas[0],
                1.0 - update.betas[0],
                update.betas[1],
                1.0 - update.betas[1],
                update.eps,
                LOW=low is not None,
                REMAINDER=rest is not None,
                BLOCK=blocks.flat,
            )


def _computes(row: Row, remainder: Tensor | None) -> bool:
    """Return whether the kernel supports this row: contiguous, fp32 moments and masters, known gradient types."""
    weight, gradient, average, square, low, _ = row
    held = [x for x in (weight, average, square, low, remainder) if x is not None]
    if any(not x.is_contiguous() for x in held):
        report_fallback("adamw", "cuda", "has no kernel for tensors that are not contiguous")
        return False
    wide = (average, square) if remainder is not None else (weight, average, square)
    if not all(language.computes("adamw", x, types=(torch.float32,)) for x in wide):
        return False
    return all(language.computes("adamw", x) for x in (gradient, low) if x is not None)


@jit
def _adamw(
    weight_at: tl.tensor, rest_at: tl.tensor, gradient_at: tl.tensor, average_at: tl.tensor,
    square_at: tl.tensor, low_at: tl.tensor, count: tl.tensor, factor: tl.tensor, keep: tl.tensor,
    rate: tl.tensor, correction: tl.tensor, beta_1: tl.tensor, rest_1: tl.tensor, beta_2: tl.tensor,
    rest_2: tl.tensor, eps: tl.tensor, LOW: tl.constexpr, REMAINDER: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    square = tl.load(square_at + at, inside, 0.0)
    if REMAINDER:
        # native.masters: the master's bits are those of the weight plus the remainder; the square's sign marks a tie.
        marked = square.to(tl.int32, bitcast=True)
        square = (marked & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        high = tl.load(weight_at + at, inside, 0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tie = (marked < 0).to(tl.int32) << 16
        bits = high + tl.load(rest_at + at, inside, 0).to(tl.int32) + tie
        weight = bits.to(tl.float32, bitcast=True)
    else:
        weight = tl.load(weight_at + at, inside, 0.0)
    gradient = tl.load(gradient_at + at, inside, 0.0).to(tl.float32) * factor
    average = tl.load(average_at + at, inside, 0.0) * beta_1 + gradient * rest_1
    square = square * beta_2 + gradient * gradient * rest_2
    weight = weight * keep - rate * average / (tl.sqrt_rn(square) * correction + eps)
    tl.store(average_at + at, average, inside)
    if REMAINDER:
        bits = weight.to(tl.int32, bitcast=True)
        # Round to nearest, ties to even. A NaN keeps its upper half plus a bit that distinguishes it from infinity.
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = weight != weight
        upper = tl.where(nan, (bits >> 16) | 0x40, upper)
        distance = tl.where(nan, 0, bits - (upper << 16))
        tl.store(weight_at + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
        tl.store(rest_at + at, distance.to(tl.int16), inside)
        square = (square.to(tl.int32, bitcast=True) | tl.where(distance == 0x8000, -0x80000000, 0)).to(
            tl.float32, bitcast=True
        )
    else:
        tl.store(weight_at + at, weight, inside)
    tl.store(square_at + at, square, inside)
    if LOW:
        tl.store(low_at + at, weight.to(low_at.dtype.element_ty), inside)
