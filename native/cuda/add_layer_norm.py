"""Residual and layer norm on CUDA in one pass: each pass reads a row once; sums are in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.cuda import language, norms
from native.cuda.language import why_not as why_not
from native.reference import add_layer_norm as plain


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return language.describe("sum and norm in one pass")


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their type, and its layer norm."""
    if x.dtype != residual.dtype or not language.computes("add_layer_norm", x, x.shape[-1]):
        return plain(x, residual, weight, bias, eps)
    result: tuple[Tensor, Tensor] = _AddLayerNorm.apply(x, residual, weight, bias, eps)  # type: ignore[no-untyped-call]
    return result


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        made = norms.normalise(x, residual, weight, bias, eps, centre=True)
        assert made.total is not None
        ctx.save_for_backward(made.total, weight, made.means, made.inverses)
        ctx.bias_type = None if bias is None else bias.dtype
        return made.total, made.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, means, inverses = ctx.saved_tensors
        made = norms.derive(
            upstream, of_total, total, weight, means, inverses, bias=ctx.bias_type is not None
        )
        of_bias = None if made.bias is None else made.bias.to(ctx.bias_type)
        return made.x, made.x, made.weight, of_bias, None
