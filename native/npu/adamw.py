"""AdamW on Ascend NPUs by CANN's fused update, one call per tensor.

Written after Ascend's documentation and tested only with a stand-in: it has not run on an NPU yet.
"""

from __future__ import annotations

import importlib
from typing import Any

from native.npu.attention import why_not as why_not
from native.update import AdamWStep


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "CANN's fused update"


def adamw(update: AdamWStep) -> None:
    """Update the weights and moments.

    The kernel takes the betas' powers of the previous step and multiplies them by the betas itself.
    """
    kernel: Any = importlib.import_module("torch_npu").npu_apply_adam_w
    powers = [beta ** (update.step - 1) for beta in update.betas]
    for weight, gradient, average, square, low, decay in update.rows():
        wide = gradient.to(weight.dtype)
        if update.factor != 1.0:
            wide.mul_(update.factor)
        moments = (weight, average, square)
        numbers = (*powers, update.rate, decay, *update.betas, update.eps)
        kernel(*numbers, wide, None, False, False, out=moments)
        if low is not None:
            low.copy_(weight)
