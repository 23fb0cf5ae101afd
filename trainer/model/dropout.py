"""Dropout of what a block adds to the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import native

# Seeds and counters are from 0 to this.
LARGEST = 1 << 62


def dropout_add(ops: native.Choice, x: Tensor, residual: Tensor, probability: float) -> Tensor:
    """Return residual + dropout(x).

    On a CPU the seed comes from torch's generator, which recomputation sets back, and the mask is not kept. Other
    devices have no kernel for it, so there torch draws and keeps the mask.
    """
    if x.device.type != "cpu" or x.dtype != residual.dtype:
        return residual + F.dropout(x, probability)
    return ops.dropout_add(x, residual, None, torch.randint(LARGEST, (2,)), probability)
