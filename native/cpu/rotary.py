"""Rotary positions of queries and keys on a CPU, in one pass in each direction, computed in fp32."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native import reference
from native.compiled.library import load, why_not
from native.compiled.op import POINTER, SUFFIX, kernel, register, structure
from native.fallback import report_fallback
from native.gradients import rotary_op, rotated_shapes

__all__ = ["describe", "rotary", "why_not"]


class _Span(ctypes.Structure):
    """The layout of `struct Span` in rotary.cpp."""

    _fields_ = structure(("at",), *((name, ctypes.c_int64) for name in ("batch", "head", "row")))

    @classmethod
    def of(cls, x: Tensor) -> _Span:
        return cls(x.data_ptr(), *x.stride()[:3])


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in rotary.cpp."""

    _fields_ = (
        *((name, _Span) for name in ("q", "k", "q_out", "k_out")),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "rows", "dim", "half")),
        ("angles_batch", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("interleaved", "back", "threads", "level")),
    )


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"queries and keys in one pass ({load().describe()})"


def rotary(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys; the reference computes types other than fp32 and bf16."""
    if q.dtype not in SUFFIX or q.dtype != k.dtype:
        report_fallback("rotary", "cpu", f"has no kernel for {q.dtype} and {k.dtype}")
        return reference.rotary(q, k, cosines, sines, interleaved)
    turned: tuple[Tensor, Tensor] = _OP(q, k, cosines.float(), sines.float(), interleaved, False)
    return turned


def _compute(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out = rotated_shapes(q, k)
    batch, heads, rows, dim = q.shape
    if not q.numel():
        return out
    cosines, sines = cosines.contiguous(), sines.contiguous()
    half = cosines.shape[-1]
    arguments = _Arguments(
        *map(_Span.of, (q, k, *out)),
        cosines.data_ptr(),
        sines.data_ptr(),
        batch,
        heads,
        k.shape[1],
        rows,
        dim,
        half,
        rows * half if len(cosines) > 1 else 0,
        interleaved,
        back,
        torch.get_num_threads(),
        load().level,
    )
    kernel("native_rotary", q.dtype, POINTER)(ctypes.byref(arguments))
    return out


_OP = rotary_op(register, _compute)
