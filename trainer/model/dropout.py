"""Dropout before a result is added to the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import native
from native import reference

# The largest seed or counter.
LARGEST = 1 << 62


def dropout_add(ops: native.Choice, x: Tensor, residual: Tensor, probability: float) -> Tensor:
    """Return residual + dropout(x).

    The seed comes from torch's generator, which recomputation resets; the mask is not stored. If a device has no
    kernel for it, torch draws and stores the mask; on a CPU the reference drops the same numbers as the kernel.
    """
    is_slow = x.device.type != "cpu" and ops.dropout_add is reference.dropout_add
    if is_slow or x.dtype != residual.dtype:
        return residual + F.dropout(x, probability)
    return ops.dropout_add(x, residual, None, torch.randint(LARGEST, (2,)), probability)
