"""SwiGLU on a CPU, with one pass in each direction; only the input is stored for the backward pass."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.compiled.arguments import POINTER, SIZE
from native.compiled.library import load
from native.compiled.op import address, computes, kernel, register
from native.gradients import half_as_wide, swiglu_ops
from native.reference import swiglu as plain
from native.reference import swiglu_backward as plain_backward

METHOD = "one pass each way"


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) times up, the halves of `x`; the reference computes types other than fp32 and bf16."""
    if not computes("swiglu", x):
        return plain(x)
    result: Tensor = _FORWARD(x)
    return result


def swiglu_backward(x: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of `x` from that of `swiglu`."""
    if not computes("swiglu", x):
        return plain_backward(x, upstream)
    result: Tensor = _BACKWARD(x, upstream)
    return result


def _run(x: Tensor, upstream: Tensor | None) -> Tensor:
    x = x.contiguous()
    above = None if upstream is None else upstream.contiguous()
    out = half_as_wide(x) if above is None else torch.empty_like(x)
    run = kernel("native_swiglu", x.dtype, POINTER, POINTER, POINTER, SIZE, SIZE, ctypes.c_int, ctypes.c_int)
    rows, inner = x.numel() // max(1, x.shape[-1]), x.shape[-1] // 2
    run(x.data_ptr(), address(above), out.data_ptr(), rows, inner, torch.get_num_threads(), load().level)
    return out


_FORWARD, _BACKWARD = swiglu_ops(register, _run)
