"""GELU on CUDA, of x or of x + bias, with one pass in each direction; only inputs are kept for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from native import reference
from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, register, tl
from native.gradients import gelu_ops

METHOD = "one pass each way"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`, exact or by tanh."""
    if approximate not in ("none", "tanh") or not language.computes("gelu", x):
        return reference.gelu(x, approximate)
    result: Tensor = _FORWARD(x, None, approximate == "tanh")
    return result


def gelu_backward(x: Tensor, upstream: Tensor, approximate: str = "none") -> Tensor:
    """Return the gradient of `x` from that of `gelu`."""
    if approximate not in ("none", "tanh") or not language.computes("gelu", x):
        return reference.gelu_backward(x, upstream, approximate)
    result: Tensor = _BACKWARD(upstream, x, None, approximate == "tanh")[0]
    return result


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of x + bias, exact or by tanh; the sum is never stored."""
    if approximate not in ("none", "tanh") or not language.computes("bias_gelu", x):
        return reference.bias_gelu(x, bias, approximate)
    result: Tensor = _FORWARD(x, bias, approximate == "tanh")
    return result


@jit
def gelu_of(
    x: tl.tensor, TANH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return GELU of fp32 numbers; 1 + tanh(u) is 2 sigmoid(2 u)."""
    if TANH:
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))


@jit
def gelu_slope(
    x: tl.tensor, TANH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the derivative of GELU at fp32 numbers."""
    if TANH:
        square = x * x
        part = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        # The other part, 1 - part, without cancellation.
        rest = tl.sigmoid(-1.5957691216057308 * x * (1.0 + 0.044715 * square))
        return part + x * part * rest * 1.5957691216057308 * (1.0 + 0.134145 * square)
    return 0.5 * (1.0 + tl.erf(0.7071067811865476 * x)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@jit
def _gelu(
    x_at: tl.tensor, upstream_at: tl.tensor, out_at: tl.tensor, count: tl.tensor, BACKWARD: tl.constexpr,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_at + at, at < count, 0.0).to(tl.float32)
    if BACKWARD:
        out = tl.load(upstream_at + at, at < count, 0.0).to(tl.float32) * gelu_slope(x, TANH)
    else:
        out = gelu_of(x, TANH)
    tl.store(out_at + at, out.to(out_at.dtype.element_ty), at < count)


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


def _forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    if bias is None:
        return _run(x, None, tanh)
    x, own = x.contiguous(), bias.contiguous()
    out, count, blocks = torch.empty_like(x), x.numel(), blocks_for(x)
    if count:
        grid = (-(-count // blocks.flat),)
        with on_device(x):
            _values[grid](x, own, out, count, x.shape[-1], TANH=tanh, BLOCK=blocks.flat)
    return out


def _backward(upstream: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x`, and in fp32 that of the bias."""
    if bias is None:
        return _run(x, upstream, tanh), x.new_empty(0, dtype=torch.float32)
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
    return out, sums.sum(0)


def _run(x: Tensor, upstream: Tensor | None, tanh: bool) -> Tensor:
    x = x.contiguous()
    above = x if upstream is None else upstream.contiguous()
    out, count, blocks = torch.empty_like(x), x.numel(), blocks_for(x)
    if count:
        with on_device(x):
            _gelu[(-(-count // blocks.flat),)](
                x, above, out, count, BACKWARD=upstream is not None, TANH=tanh, BLOCK=blocks.flat
            )
    return out


_FORWARD, _BACKWARD = gelu_ops(register, _forward, _backward)
