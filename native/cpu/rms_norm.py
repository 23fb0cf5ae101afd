"""RMS norm on a CPU: each pass reads a row once; sums and the weight's gradient are in fp32."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.compiled.library import NAMESPACE, load, why_not
from native.reference import rms_norm as plain

__all__ = ["describe", "rms_norm", "why_not"]

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
# The rows are divided into this many pieces; each has a separate sum of the weight's gradient.
PIECES = 32


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in rms_norm.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "above", "weight", "out", "inverse", "sums", "scratch")),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("piece", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int),
        ("level", ctypes.c_int),
    )


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"a row at a time, sums in fp32 ({load().describe()})"


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the RMS norm of `x`; the reference computes other types than fp32 and bf16."""
    if x.dtype not in _SUFFIX:
        return plain(x, weight, eps)
    _register()
    result: Tensor = _Rows.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _Rows(torch.autograd.Function):
    """RMS norm that saves its input, its weight and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse = torch.ops.clusterctl_native.rms_norm(x, weight.float(), eps)
        ctx.save_for_backward(x, weight, inverse)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        own, sums = torch.ops.clusterctl_native.rms_norm_backward(upstream, x, weight.float(), inverse)
        return own, sums.to(weight.dtype), None


@functools.cache
def _register() -> torch.library.Library:
    """Register the ops with torch, so that profilers show their names; keep the result as long as they are called."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
    library.define(
        "rms_norm_backward(Tensor upstream, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)"
    )
    library.impl("rms_norm", _forward, "CPU")
    library.impl("rms_norm", lambda x, *_: _results(x), "Meta")
    library.impl("rms_norm_backward", _backward, "CPU")
    library.impl("rms_norm_backward", lambda _, x, *__: (torch.empty_like(x), _sums(x)), "Meta")
    return library


def _results(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.numel() // max(1, x.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=torch.float32)


def _sums(x: Tensor, *shape: int) -> Tensor:
    return x.new_zeros(*shape, x.shape[-1], dtype=torch.float32)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out, inverse = _results(x)
    _run(x, None, weight.contiguous(), out, inverse, None, eps)
    return out, inverse


def _backward(upstream: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    x, upstream = x.contiguous(), upstream.contiguous()
    out, sums = torch.empty_like(x), _sums(x, PIECES)
    _run(x, upstream, weight.contiguous(), out, inverse, sums, 0.0)
    return out, sums.sum(0)


def _run(
    x: Tensor,
    upstream: Tensor | None,
    weight: Tensor,
    out: Tensor,
    inverse: Tensor,
    sums: Tensor | None,
    eps: float,
) -> None:
    rows, width = len(inverse), x.shape[-1]
    if not rows:
        return
    threads = max(1, torch.get_num_threads())
    scratch = torch.empty(threads, 2, width, dtype=torch.float32)
    given = (x, upstream, weight, out, inverse, sums, scratch)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in given]
    arguments = _Arguments(*addresses, rows, width, -(-rows // PIECES), eps, threads, load().level)
    load().functions[f"native_rms_norm_{_SUFFIX[x.dtype]}"](
        ctypes.byref(arguments), int(upstream is not None)
    )
