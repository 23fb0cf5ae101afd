"""SwiGLU on Ascend NPUs by CANN's npu_swiglu."""

from __future__ import annotations

from torch import Tensor

from native.npu import library
from native.reference import swiglu as plain
from native.reference import swiglu_backward as plain_backward

NEEDS = ("npu_swiglu", "npu_swiglu_backward")
METHOD = "CANN's npu_swiglu"


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) times up, the halves of `x`; the kernel needs a tensor without gaps."""
    if not library.computes("swiglu", x):
        return plain(x)
    out: Tensor = library.kernel("npu_swiglu")(x.contiguous(), dim=-1)
    return out


def swiglu_backward(x: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of `x` from that of `swiglu`."""
    if not library.computes("swiglu", x):
        return plain_backward(x, upstream)
    found: Tensor = library.kernel("npu_swiglu_backward")(upstream, x.contiguous(), dim=-1)
    return found
