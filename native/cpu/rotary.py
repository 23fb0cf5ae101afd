"""Rotary positions of queries and keys on a CPU, in one pass in each direction, computed in fp32."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native import reference
from native.compiled.arguments import INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import SUFFIX, kernel, register
from native.fallback import report_fallback
from native.gradients import no_result, rotary_op, rotated_shapes


class _Span(ctypes.Structure):
    """The layout of `struct Span` in rotary.cpp."""

    _fields_ = structure((POINTER, "at"), (SIZE, "batch head row"))

    @classmethod
    def of(cls, x: Tensor) -> _Span:
        return cls(x.data_ptr(), *x.stride()[:3])


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in rotary.cpp."""

    _fields_ = structure(
        (_Span, "q k q_out k_out"),
        (POINTER, "cosines sines"),
        (SIZE, "batch heads groups rows dim half angles_batch"),
        (INT, "interleaved back threads level"),
    )


METHOD = "queries and keys in one pass"


def rotary(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys; the reference computes types other than fp32 and bf16."""
    if q.dtype not in SUFFIX or q.dtype != k.dtype:
        report_fallback("rotary", "cpu", f"has no kernel for {q.dtype} and {k.dtype}")
        return reference.rotary(q, k, cosines, sines, interleaved)
    turned: tuple[Tensor, Tensor] = _OP(q, k, cosines.float(), sines.float(), interleaved, False)
    return turned


def rotary_(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys in the memory of `q` and `k`, where the kernel can write there."""
    dense = q.stride(-1) == k.stride(-1) == 1
    if not dense or q.dtype not in SUFFIX or q.dtype != k.dtype or torch.compiler.is_compiling():
        return rotary(q, k, cosines, sines, interleaved)
    given = q, k, cosines.float(), sines.float(), interleaved
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        turned: tuple[Tensor, Tensor] = _InPlace.apply(*given)  # type: ignore[no-untyped-call]
        return turned
    _OVERWRITE(*given)
    return q, k


class _InPlace(torch.autograd.Function):
    """The rotation for autograd. It returns views, because autograd changes nothing in place in parts of a tensor."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        _OVERWRITE(q, k, cosines, sines, interleaved)
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        return q.view_as(q), k.view_as(k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor) -> tuple[Tensor | None, ...]:
        return *_OP(of_q, of_k, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


def _overwrite(q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> None:
    _write((q, k), q, k, cosines, sines, interleaved, False)


def _compute(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out = rotated_shapes(q, k)
    _write(out, q, k, cosines, sines, interleaved, back)
    return out


def _write(
    out: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    cosines: Tensor,
    sines: Tensor,
    interleaved: bool,
    back: bool,
) -> None:
    """Write the rotated `q` and `k` into `out`, which may be themselves."""
    batch, heads, rows, dim = q.shape
    if not q.numel():
        return
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


_OP = rotary_op(register, _compute)
_OVERWRITE = register(
    "rotary_(Tensor(a!) q, Tensor(b!) k, Tensor cosines, Tensor sines, bool interleaved) -> ()",
    _overwrite,
    no_result,
)
