"""AdamW on Ascend NPUs: CANN's fused update, one call a tensor.

Written to Ascend's documents and run against a stand-in only: no NPU has seen it yet.
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
    """As the reference; the kernel is given the betas' powers of the step before, and multiplies them itself."""
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
