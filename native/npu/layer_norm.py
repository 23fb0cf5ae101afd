"""Layer norm on Ascend NPUs by torch's own function, which is one kernel of CANN there.

It computes in fp32 and sums the weight's gradient in fp32, so inputs and outputs are not copied to fp32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from native.npu import library
from native.reference import layer_norm as plain

METHOD = "CANN's layer norm, without fp32 copies"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Return the layer norm of `x`."""
    if not library.computes("layer_norm", x, "layer_norm"):
        return plain(x, weight, bias, eps)
    # aclnnLayerNorm: weight and bias have one type, that of the input or fp32.
    if not library.takes_weight("layer_norm", x, weight) or (bias is not None and bias.dtype != weight.dtype):
        weight, bias = weight.float(), None if bias is None else bias.float()
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
