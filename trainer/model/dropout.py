"""Dropout of what a block adds to the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import native
from native import reference

# Seeds and counters are from 0 to this.
LARGEST = 1 << 62


def dropout_add(ops: native.Choice, x: Tensor, residual: Tensor, probability: float) -> Tensor:
    """Return residual + dropout(x).

    The seed comes from torch's generator, which recomputation sets back, and the mask is not kept. Where a device has
    no kernel for it, torch draws and keeps the mask; on a CPU the reference repeats what the kernel drops.
    """
    is_slow = x.device.type != "cpu" and ops.dropout_add is reference.dropout_add
    if is_slow or x.dtype != residual.dtype:
        return residual + F.dropout(x, probability)
    return ops.dropout_add(x, residual, None, torch.randint(LARGEST, (2,)), probability)
