"""Bias and GELU on CUDA, with one pass in each direction; the sum of x and bias is never stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.gelu import gelu_of, gelu_slope
from native.cuda.language import jit, on_device, register, tl
from native.reference import bias_gelu as plain

METHOD = "one pass each way"


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of x + bias, exact or by tanh."""
    if approximate not in ("none", "tanh") or not language.computes("bias_gelu", x):
        return plain(x, bias, approximate)
    result: Tensor = _FORWARD(x, bias, approximate == "tanh")
    return result


@jit
def _values(
    x_at: tl.tensor, bias_at: tl.tensor, out_at: tl.tensor, count: tl.tensor, width: tl.tensor,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_at + at, inside, 0.0).to(tl.float32) + tl.load(bias_at + at % width, inside, 0.0).to(
        tl.float32
    )
    tl.store(out_at + at, gelu_of(x, TANH).to(out_at.dtype.element_ty), inside)


@jit
def _slopes(
    x_at: tl.tensor, bias_at: tl.tensor, upstream_at: tl.tensor, out_at: tl.tensor, sums_at: tl.tensor,
    rows: tl.tensor, width: tl.tensor, piece: tl.tensor, TANH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    bias = tl.load(bias_at + column, inside, 0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(program * piece, tl.minimum(program * piece + piece, rows)):
        at = row * width + column
        x = tl.load(x_at + at, inside, 0.0).to(tl.float32) + bias
        slope = tl.load(upstream_at + at, inside, 0.0).to(tl.float32) * gelu_slope(x, TANH)
        tl.store(out_at + at, slope.to(out_at.dtype.element_ty), inside)
        total += slope
    tl.store(sums_at + program * width + column, total, inside)


def _forward(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    x, own = x.contiguous(), bias.contiguous()
    out, count, blocks = torch.empty_like(x), x.numel(), blocks_for(x)
    if count:
        grid = (-(-count // blocks.flat),)
        with on_device(x):
            _values[grid](x, own, out, count, x.shape[-1], TANH=tanh, BLOCK=blocks.flat)
    return out


def _backward(x: Tensor, bias: Tensor, upstream: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and of the bias."""
    x, own = x.contiguous(), bias.contiguous()
    width, blocks = x.shape[-1], blocks_for(x)
    rows = x.numel() // max(1, width)
    piece = -(-max(1, rows) // blocks.pieces)
    pieces = -(-rows // piece)
    out = torch.empty_like(x)
    sums = torch.zeros(pieces, width, dtype=torch.float32, device=x.device)
    if rows and width:
        size = min(blocks.flat, language.width_of(width))
        given = (x, own, upstream.contiguous(), out, sums, rows, width, piece)
        with on_device(x):
            _slopes[(pieces, -(-width // size))](*given, TANH=tanh, BLOCK=size)
    return out, sums.sum(0).to(bias.dtype)


def _empty(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gradients(x: Tensor, bias: Tensor, upstream: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return _empty(x), bias.new_empty(bias.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _gradient(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_BACKWARD(*ctx.saved_tensors, upstream, ctx.tanh), None


_BACKWARD = register(
    "bias_gelu_backward(Tensor x, Tensor bias, Tensor upstream, bool tanh) -> (Tensor, Tensor)",
    _backward,
    _gradients,
)
_FORWARD = register(
    "bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor", _forward, _empty, _keep, _gradient
)
