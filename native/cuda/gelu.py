"""GELU on CUDA, with one pass in each direction; only the input is stored for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, register, tl
from native.reference import gelu as plain
from native.reference import gelu_backward as plain_backward

METHOD = "one pass each way"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`, exact or by tanh."""
    if approximate not in ("none", "tanh") or not language.computes("gelu", x):
        return plain(x, approximate)
    result: Tensor = _FORWARD(x, approximate == "tanh")
    return result


def gelu_backward(x: Tensor, upstream: Tensor, approximate: str = "none") -> Tensor:
    """Return the gradient of `x` from that of `gelu`."""
    if approximate not in ("none", "tanh") or not language.computes("gelu", x):
        return plain_backward(x, upstream, approximate)
    result: Tensor = _BACKWARD(x, upstream, approximate == "tanh")
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


def _forward(x: Tensor, tanh: bool) -> Tensor:
    return _run(x, None, tanh)


def _empty(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _gradient(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
    return _BACKWARD(ctx.saved_tensors[0], upstream, ctx.tanh), None


_BACKWARD = register("gelu_backward(Tensor x, Tensor upstream, bool tanh) -> Tensor", _run, _empty)
_FORWARD = register("gelu(Tensor x, bool tanh) -> Tensor", _forward, _empty, _keep, _gradient)
