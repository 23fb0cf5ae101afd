"""AdamW on Ascend NPUs: torch's fused AdamW if torch_npu has it, else CANN's update, one call per tensor."""

from __future__ import annotations

from typing import Any

from native.masters import joined_one_by_one
from native.npu import facts, library
from native.reference import adamw as plain
from native.reference import fuses_adamw
from native.update import AdamWStep

NEEDS = ("npu_apply_adam_w",)


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "torch's fused AdamW of torch_npu" if _is_fused() else "CANN's fused update of each tensor"


def _is_fused() -> bool:
    return fuses_adamw("npu") and bool(facts.types("_fused_adamw_", library.chips()))


def adamw(update: AdamWStep) -> None:
    """Update the weights and moments.

    The kernel takes the betas' powers of the previous step and multiplies them by the betas itself.
    """
    if _is_fused():
        plain(update)
        return
    if any(remainder is not None for remainder in update.remainders):
        joined_one_by_one(update, adamw)
        return
    kernel: Any = library.kernel("npu_apply_adam_w")
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
