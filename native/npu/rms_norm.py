"""RMS norm on Ascend NPUs by CANN's npu_rms_norm."""

from __future__ import annotations

from torch import Tensor

from native.npu import library
from native.reference import rms_norm as plain

NEEDS = ("npu_rms_norm",)
METHOD = "CANN's npu_rms_norm"


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the RMS norm of `x`."""
    if not library.computes("rms_norm", x):
        return plain(x, weight, eps)
    # The kernel supports a weight in the type of the input or in fp32, and 2 to 8 dimensions.
    if not library.takes_weight("npu_rms_norm", x, weight):
        weight = weight.float()
    out: Tensor = library.kernel("npu_rms_norm")(x.reshape(-1, x.shape[-1]), weight, eps)[0]
    return out.view(x.shape)
