"""SwiGLU on a CPU, with one pass in each direction; only its input is kept for the backward pass."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from native.compiled.library import load, why_not
from native.compiled.op import POINTER, SIZE, address, computes, kernel, register
from native.reference import swiglu as plain

__all__ = ["describe", "swiglu", "why_not"]


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"one pass each way ({load().describe()})"


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) times up of the halves of `x`; the reference computes other types than fp32 and bf16."""
    if not computes("swiglu", x):
        return plain(x)
    result: Tensor = _FORWARD(x)
    return result


def _result(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _like(x: Tensor, upstream: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run(x: Tensor, upstream: Tensor | None) -> Tensor:
    x = x.contiguous()
    above = None if upstream is None else upstream.contiguous()
    out = _result(x) if above is None else torch.empty_like(x)
    run = kernel("native_swiglu", x.dtype, POINTER, POINTER, POINTER, SIZE, SIZE, ctypes.c_int, ctypes.c_int)
    rows, inner = x.numel() // max(1, x.shape[-1]), x.shape[-1] // 2
    run(x.data_ptr(), address(above), out.data_ptr(), rows, inner, torch.get_num_threads(), load().level)
    return out


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, upstream: Tensor) -> Tensor:
    result: Tensor = _BACKWARD(*ctx.saved_tensors, upstream)
    return result


_FORWARD = register("swiglu(Tensor x) -> Tensor", lambda x: _run(x, None), _result, _keep, _gradient)
_BACKWARD = register("swiglu_backward(Tensor x, Tensor upstream) -> Tensor", _run, _like)
