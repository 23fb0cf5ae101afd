"""Residual and layer norm on Ascend NPUs in one pass by CANN's npu_add_layer_norm, which has a derivative.

With inputs of 16 bits, CANN's layer norm follows an addition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native.npu import library
from native.npu.layer_norm import layer_norm
from native.reference import add_layer_norm as plain

NEEDS = ("npu_add_layer_norm",)
METHOD = "CANN's npu_add_layer_norm"


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their type, and its layer norm."""
    if not library.computes("add_layer_norm", x):
        return plain(x, residual, weight, bias, eps)
    beta = torch.zeros_like(weight) if bias is None else bias
    # The backward kernel decides: it takes a weight in the type of the input only; the trainer's are fp32.
    if (
        not library.takes_weight("npu_add_layer_norm_backward", x, weight)
        or not weight.dtype == beta.dtype == residual.dtype
    ):
        total = x + residual
        return total, layer_norm(total, weight, bias, eps)
    kernel = library.kernel("npu_add_layer_norm")
    out, _, _, total = kernel(x, residual, weight, beta, eps, additional_output=True)
    return total, out
