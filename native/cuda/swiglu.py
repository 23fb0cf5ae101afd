"""SwiGLU on CUDA, with one pass in each direction; only the input is stored for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, register, tl
from native.gradients import half_as_wide, swiglu_ops
from native.reference import swiglu as plain
from native.reference import swiglu_backward as plain_backward

METHOD = "one pass each way"


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) times up of the halves of `x`."""
    if x.shape[-1] % 2 or not language.computes("swiglu", x):
        return plain(x)
    result: Tensor = _FORWARD(x)
    return result


def swiglu_backward(x: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of `x` from that of `swiglu`."""
    if x.shape[-1] % 2 or not language.computes("swiglu", x):
        return plain_backward(x, upstream)
    result: Tensor = _BACKWARD(x, upstream)
    return result


@jit
def _swiglu(
    x_at: tl.tensor, upstream_at: tl.tensor, out_at: tl.tensor, count: tl.tensor, inner: tl.tensor,
    BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    # The gate of an output has the same index in its row of x, which is twice as long.
    gate_at = at + at // inner * inner
    gate = tl.load(x_at + gate_at, inside, 0.0).to(tl.float32)
    up = tl.load(x_at + gate_at + inner, inside, 0.0).to(tl.float32)
    part = tl.sigmoid(gate)
    if BACKWARD:
        upstream = tl.load(upstream_at + at, inside, 0.0).to(tl.float32)
        slope = part * (1.0 + gate * tl.sigmoid(-gate))
        tl.store(out_at + gate_at, (upstream * up * slope).to(out_at.dtype.element_ty), inside)
        tl.store(out_at + gate_at + inner, (upstream * gate * part).to(out_at.dtype.element_ty), inside)
    else:
        tl.store(out_at + at, (gate * part * up).to(out_at.dtype.element_ty), inside)


def _run(x: Tensor, upstream: Tensor | None) -> Tensor:
    x = x.contiguous()
    inner = x.shape[-1] // 2
    out = half_as_wide(x) if upstream is None else torch.empty_like(x)
    above = out if upstream is None else upstream.contiguous()
    count, blocks = x.numel() // 2, blocks_for(x)
    if count:
        with on_device(x):
            _swiglu[(-(-count // blocks.flat),)](
                x, above, out, count, inner, BACKWARD=upstream is not None, BLOCK=blocks.flat
            )
    return out


_FORWARD, _BACKWARD = swiglu_ops(register, _run)
