"""GELU on Ascend NPUs by CANN's npu_gelu, because torch's own function ignores `approximate` there and uses tanh."""

from __future__ import annotations

from torch import Tensor

from native.npu import library
from native.reference import gelu as plain
from native.reference import gelu_backward as plain_backward

NEEDS = ("npu_gelu", "npu_gelu_backward")
METHOD = "CANN's npu_gelu, exact or by tanh"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`, exact or by tanh."""
    if not library.computes("gelu", x):
        return plain(x, approximate)
    out: Tensor = library.kernel("npu_gelu")(x, approximate=approximate)
    return out


def gelu_backward(x: Tensor, upstream: Tensor, approximate: str = "none") -> Tensor:
    """Return the gradient of `x` from that of `gelu`."""
    if not library.computes("gelu", x):
        return plain_backward(x, upstream, approximate)
    found: Tensor = library.kernel("npu_gelu_backward")(upstream, x, approximate=approximate)
    return found
