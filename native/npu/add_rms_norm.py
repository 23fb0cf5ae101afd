"""Residual and RMS norm on Ascend NPUs in one pass by CANN's npu_add_rms_norm.

torch_npu has no derivative for it, so the backward pass calls that of npu_rms_norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.npu import library
from native.npu.rms_norm import rms_norm
from native.reference import add_rms_norm as plain

NEEDS = ("npu_add_rms_norm", "npu_rms_norm", "npu_rms_norm_backward")
METHOD = "CANN's npu_add_rms_norm"


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their type, and its RMS norm."""
    if not library.computes("add_rms_norm", x):
        return plain(x, residual, weight, eps)
    # The kernel only accepts a weight in the type of the input, and the trainer's are fp32.
    if not weight.dtype == residual.dtype == x.dtype:
        total = x + residual
        return total, rms_norm(total, weight, eps)
    result: tuple[Tensor, Tensor] = _AddRMSNorm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        flat, other = (each.reshape(-1, each.shape[-1]) for each in (x, residual))
        out, inverse, total = library.kernel("npu_add_rms_norm")(flat, other, weight, eps)
        ctx.save_for_backward(total, weight, inverse)
        return total.view(x.shape), out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, inverse = ctx.saved_tensors
        kernel = library.kernel("npu_rms_norm_backward")
        own, of_weight = kernel(upstream.reshape(total.shape), total, weight, inverse)
        own = of_total + own.view(of_total.shape)
        return own, own, of_weight.to(weight.dtype), None
