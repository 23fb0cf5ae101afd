"""Bias, dropout and residual on CUDA, with one pass in each direction; the mask is recomputed and never stored.

Half i % 8 of the words of Philox 4x32-10 for the counter `first counter + i / 8` decides whether number i is kept. CPUs
take the same halves, so a seed drops the same numbers on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, register, tl
from native.gradients import dropout_add_op
from native.masks import threshold_of
from native.reference import dropout_add as plain

METHOD = "the mask from a counter, never stored"


def dropout_add(
    x: Tensor, residual: Tensor, bias: Tensor | None, state: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias); the reference computes tensors of different types or shapes."""
    is_same = x.dtype == residual.dtype and x.shape == residual.shape
    if not is_same or not language.computes("dropout_add", x):
        return plain(x, residual, bias, state, probability)
    # The kernel reads the state on the device: so a captured pass draws other masks each time it is replayed.
    state = state.to(x.device, non_blocking=True)
    result: Tensor = _FORWARD(x, residual, bias, state, probability)
    return result


@jit
def _words(
    seed: tl.tensor, counter: tl.tensor,
) -> Any:  # fmt: skip
    """Return the four words of each counter."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, tl.zeros_like(low), tl.zeros_like(low))


@jit
def _half(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, number: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return half `number`, 0 to 7, of four words."""
    later = number % 4 >= 2
    word = tl.where(number >= 4, tl.where(later, d, c), tl.where(later, b, a))
    return (tl.where(number % 2 == 1, word >> 16, word) & 0xFFFF).to(tl.int32)


@jit
def _halves(
    seed: tl.tensor, counter: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the eight halves of the words of each counter, (counters, 8)."""
    a, b, c, d = _words(seed, counter)
    number = tl.arange(0, 8)[None, :]
    return _half(a[:, None], b[:, None], c[:, None], d[:, None], number)


@jit
def _apply(
    x_at: tl.tensor, residual_at: tl.tensor, bias_at: tl.tensor, out_at: tl.tensor, state_at: tl.tensor,
    threshold: tl.tensor, scale: tl.tensor, count: tl.tensor, width: tl.tensor,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    seed = tl.load(state_at)
    offset = tl.load(state_at + 1)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    counter = first + tl.arange(0, BLOCK)
    kept = _halves(seed, offset + counter) >= threshold
    at = counter[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < count
    x = tl.load(x_at + at, inside, 0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_at + at % width, inside, 0.0).to(tl.float32)
    out = tl.where(kept, x * scale, 0.0)
    if RESIDUAL:
        out += tl.load(residual_at + at, inside, 0.0).to(tl.float32)
    tl.store(out_at + at, out.to(out_at.dtype.element_ty), inside)


@jit
def _apply_and_sum(
    upstream_at: tl.tensor, out_at: tl.tensor, sums_at: tl.tensor, state_at: tl.tensor,
    threshold: tl.tensor, scale: tl.tensor, rows: tl.tensor, width: tl.tensor, piece: tl.tensor,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    seed = tl.load(state_at)
    offset = tl.load(state_at + 1)
    program = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * 8 * BLOCK
    column = first + tl.arange(0, BLOCK)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = column < width
    total = tl.zeros([BLOCK, 8], tl.float32)
    for row in range(program * piece, tl.minimum(program * piece + piece, rows)):
        at = row * width + column
        if WHOLE:
            # A row starts with the first half of a counter.
            half = _halves(seed, offset + (row * width + first) // 8 + tl.arange(0, BLOCK))
        else:
            a, b, c, d = _words(seed, offset + at // 8)
            half = _half(a, b, c, d, at % 8)
        slope = tl.load(upstream_at + at, inside, 0.0).to(tl.float32) * scale
        slope = tl.where(half >= threshold, slope, 0.0)
        tl.store(out_at + at, slope.to(out_at.dtype.element_ty), inside)
        total += slope
    tl.store(sums_at + program * width + column, total, inside)


def _forward(x: Tensor, residual: Tensor, bias: Tensor | None, state: Tensor, probability: float) -> Tensor:
    return _elements(x, residual, bias, state, probability)


def _elements(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, state: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias); without a residual, only the dropout."""
    x = x.contiguous()
    other, added = (x if each is None else each.contiguous() for each in (residual, bias))
    out, count, block = torch.empty_like(x), x.numel(), blocks_for(x).flat // 8
    numbers = (state, threshold_of(probability, 16), 1.0 / (1.0 - probability), count, x.shape[-1])
    if count:
        with on_device(x):
            _apply[(-(-count // (8 * block)),)](
                x,
                other,
                added,
                out,
                *numbers,
                BIAS=bias is not None,
                RESIDUAL=residual is not None,
                BLOCK=block,
            )
    return out


def _backward(upstream: Tensor, state: Tensor, probability: float, biased: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x`, and in fp32 that of the bias."""
    if not biased:
        return _elements(upstream, None, None, state, probability), upstream.new_empty(0, dtype=torch.float32)
    upstream, width, blocks = upstream.contiguous(), upstream.shape[-1], blocks_for(upstream)
    rows = upstream.numel() // max(1, width)
    piece = -(-max(1, rows) // blocks.pieces)
    pieces = -(-rows // piece)
    out, sums = torch.empty_like(upstream), upstream.new_zeros(pieces, width, dtype=torch.float32)
    block = min(blocks.flat, max(8, language.width_of(width))) // 8
    numbers = (state, threshold_of(probability, 16), 1.0 / (1.0 - probability), rows, width, piece)
    if upstream.numel():
        with on_device(upstream):
            grid = (pieces, -(-width // (8 * block)))
            _apply_and_sum[grid](upstream, out, sums, *numbers, WHOLE=width % 8 == 0, BLOCK=block)
    return out, sums.sum(0)


_FORWARD = dropout_add_op(register, _forward, _backward)
