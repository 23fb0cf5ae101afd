"""Bias and GELU on Ascend NPUs: CANN has no kernel for both, so a sum is followed by npu_gelu."""

from __future__ import annotations

from torch import Tensor

from native.npu.gelu import gelu
from native.npu.gelu import why_not as why_not


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "a sum, then CANN's npu_gelu"


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of x + bias, exact or by tanh."""
    return gelu(x + bias.to(x.dtype), approximate)
