"""Bias and GELU on Ascend NPUs: CANN has no kernel for both, so a sum is followed by npu_gelu."""

from __future__ import annotations

from torch import Tensor

from native.npu.gelu import NEEDS as NEEDS
from native.npu.gelu import gelu

METHOD = "a sum, then CANN's npu_gelu"


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of x + bias, exact or by tanh."""
    return gelu(x + bias.to(x.dtype), approximate)
