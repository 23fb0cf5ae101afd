"""AdamW on CUDA: one launch for all tensors of a kind, including clipping, loss scale and the bf16 copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, tl
from native.cuda.tables import CHUNK, address, groups_of, kind_of, table_of
from native.fallback import report_fallback
from native.reference import adamw as plain
from native.update import AdamWStep

if TYPE_CHECKING:
    from torch import Tensor

    from native.update import Row

    Given = tuple[Row, Tensor | None]

METHOD = "one pass, one launch for all tensors of a kind"


def adamw(update: AdamWStep) -> None:
    """Update the weights and moments in place; a factor of NaN changes nothing."""
    rows = list(update.rows())
    remainders = update.remainders or [None] * len(rows)
    if not all(_computes(row, rest) for row, rest in zip(rows, remainders, strict=True)):
        factor = float(update.factor)
        if not math.isnan(factor):
            plain(replace(update, factor=factor))
        return
    given = [(row, rest) for row, rest in zip(rows, remainders, strict=True) if row[0].numel()]
    keys = [
        (weight.device, weight.dtype, gradient.dtype, None if low is None else low.dtype, rest is None, decay)
        for (weight, gradient, _, _, low, decay), rest in given
    ]
    for group in groups_of(keys):
        _launch(update, [given[i] for i in group])


def _launch(update: AdamWStep, given: Sequence[Given]) -> None:
    """Update tensors of one kind."""
    (first, gradient, _, _, low, decay), rest = given[0]
    kept = [row[1].contiguous() for row, _ in given]
    columns = [[row[0] for row, _ in given], kept, [row[2] for row, _ in given], [row[3] for row, _ in given]]
    # The last row has remainders or lowered copies; if there are neither, the kernel does not read it.
    if rest is not None:
        columns.append([own for _, own in given if own is not None])
    else:
        columns.append([row[0] if row[4] is None else row[4] for row, _ in given])
    table = table_of(*columns)
    factor = update.factor
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=first.device)
    with on_device(first):
        _adamw[(len(table.owners),)](
            table.addresses,
            table.counts,
            table.owners,
            table.chunks,
            factor,
            len(given),
            1.0 - update.rate * decay,
            update.rate / (1.0 - update.betas[0] ** update.step),
            (1.0 - update.betas[1] ** update.step) ** -0.5,
            update.betas[0],
            1.0 - update.betas[0],
            update.betas[1],
            1.0 - update.betas[1],
            update.eps,
            WEIGHT=kind_of(first.dtype),
            GRADIENT=kind_of(gradient.dtype),
            LAST=kind_of(columns[-1][0].dtype),
            LOW=low is not None,
            REMAINDER=rest is not None,
            ALIGNED=table.aligned,
            CHUNK=CHUNK,
            BLOCK=blocks_for(first).flat,
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
    addresses_at: tl.tensor, counts_at: tl.tensor, owners_at: tl.tensor, chunks_at: tl.tensor,
    factor_at: tl.tensor, tensors: tl.tensor, keep: tl.tensor, rate: tl.tensor, correction: tl.tensor,
    beta_1: tl.tensor, rest_1: tl.tensor, beta_2: tl.tensor, rest_2: tl.tensor, eps: tl.tensor,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, LAST: tl.constexpr, LOW: tl.constexpr,
    REMAINDER: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    factor = tl.load(factor_at)
    if factor == factor:
        program = tl.program_id(0)
        owner = tl.load(owners_at + program)
        first = tl.load(chunks_at + program).to(tl.int64) * CHUNK
        weight_at = address(addresses_at, 0, tensors, owner, WEIGHT, ALIGNED)
        gradient_at = address(addresses_at, 1, tensors, owner, GRADIENT, ALIGNED)
        average_at = address(addresses_at, 2, tensors, owner, tl.float32, ALIGNED)
        square_at = address(addresses_at, 3, tensors, owner, tl.float32, ALIGNED)
        last_at = address(addresses_at, 4, tensors, owner, LAST, ALIGNED)
        count = tl.load(counts_at + owner)
        for start in range(0, CHUNK, BLOCK):
            at = first + start + tl.arange(0, BLOCK)
            inside = at < count
            square = tl.load(square_at + at, inside, 0.0)
            if REMAINDER:
                # native.masters: the master is the weight plus the remainder; the square's sign marks a tie.
                marked = square.to(tl.int32, bitcast=True)
                square = (marked & 0x7FFFFFFF).to(tl.float32, bitcast=True)
                high = tl.load(weight_at + at, inside, 0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
                tie = (marked < 0).to(tl.int32) << 16
                bits = high + tl.load(last_at + at, inside, 0).to(tl.int32) + tie
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
                # Round to nearest, ties to even. A NaN keeps its upper half, and a bit that infinity does not have.
                upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
                nan = weight != weight
                upper = tl.where(nan, (bits >> 16) | 0x40, upper)
                distance = tl.where(nan, 0, bits - (upper << 16))
                tl.store(weight_at + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
                tl.store(last_at + at, distance.to(tl.int16), inside)
                square = (
                    square.to(tl.int32, bitcast=True) | tl.where(distance == 0x8000, -0x80000000, 0)
                ).to(tl.float32, bitcast=True)
            else:
                tl.store(weight_at + at, weight, inside)
            tl.store(square_at + at, square, inside)
            if LOW:
                tl.store(last_at + at, weight.to(LAST), inside)
