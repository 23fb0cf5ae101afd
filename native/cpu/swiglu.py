"""SwiGLU on a CPU, with one pass in each direction; only its input is kept for the backward pass."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.compiled.library import NAMESPACE, load, why_not
from native.reference import swiglu as plain

__all__ = ["describe", "swiglu", "why_not"]

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"one pass each way ({load().describe()})"


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) times up of the halves of `x`; the reference computes other types than fp32 and bf16."""
    if x.dtype not in _SUFFIX:
        return plain(x)
    _register()
    result: Tensor = _Gated.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        result: Tensor = torch.ops.clusterctl_native.swiglu(x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = torch.ops.clusterctl_native.swiglu_backward(x, upstream)
        return result


@functools.cache
def _register() -> torch.library.Library:
    """Register the ops with torch, so that profilers show their names; keep the result as long as they are called."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("swiglu(Tensor x) -> Tensor")
    library.define("swiglu_backward(Tensor x, Tensor upstream) -> Tensor")
    library.impl("swiglu", lambda x: _run(x, None), "CPU")
    library.impl("swiglu", _result, "Meta")
    library.impl("swiglu_backward", _run, "CPU")
    library.impl("swiglu_backward", lambda x, upstream: torch.empty_like(x), "Meta")
    return library


def _result(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _run(x: Tensor, upstream: Tensor | None) -> Tensor:
    x = x.contiguous()
    above = None if upstream is None else upstream.contiguous()
    out = _result(x) if above is None else torch.empty_like(x)
    inner = x.shape[-1] // 2
    load().functions[f"native_swiglu_{_SUFFIX[x.dtype]}"](
        ctypes.c_void_p(x.data_ptr()),
        None if above is None else ctypes.c_void_p(above.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel() // max(1, x.shape[-1])),
        ctypes.c_int64(inner),
        max(1, torch.get_num_threads()),
        load().level,
    )
    return out
