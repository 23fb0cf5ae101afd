"""GELU by tanh on a CPU, with one pass in each direction; torch computes the exact form."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.compiled.library import NAMESPACE, load, why_not
from native.reference import gelu as plain

__all__ = ["describe", "gelu", "why_not"]

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"by tanh, one pass each way ({load().describe()})"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`; the reference computes the exact form and other types than fp32 and bf16."""
    if approximate != "tanh" or x.dtype not in _SUFFIX:
        return plain(x, approximate)
    _register()
    result: Tensor = _ByTanh.apply(x)  # type: ignore[no-untyped-call]
    return result


class _ByTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        result: Tensor = torch.ops.clusterctl_native.gelu(x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = torch.ops.clusterctl_native.gelu_backward(x, upstream)
        return result


@functools.cache
def _register() -> torch.library.Library:
    """Register the ops with torch, so that profilers show their names; keep the result as long as they are called."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("gelu(Tensor x) -> Tensor")
    library.define("gelu_backward(Tensor x, Tensor upstream) -> Tensor")
    library.impl("gelu", lambda x: _run(x, None), "CPU")
    library.impl("gelu", torch.empty_like, "Meta")
    library.impl("gelu_backward", _run, "CPU")
    library.impl("gelu_backward", lambda x, upstream: torch.empty_like(x), "Meta")
    return library


def _run(x: Tensor, upstream: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    above = None if upstream is None else upstream.contiguous()
    load().functions[f"native_gelu_{_SUFFIX[x.dtype]}"](
        ctypes.c_void_p(x.data_ptr()),
        None if above is None else ctypes.c_void_p(above.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel()),
        max(1, torch.get_num_threads()),
        load().level,
    )
    return out
