"""AdamW on Ascend NPUs: CANN's fused update, one call a tensor.

Written to Ascend's documents and run against a stand-in only: no NPU has seen it yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from native.npu.attention import why_not as why_not


def merit() -> str:
    """What a report says of this backend."""
    return "CANN's fused update"


def adamw(
    held: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    lowered: Sequence[Tensor | None],
    decays: Sequence[float],
    step: int,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    factor: float = 1.0,
) -> None:
    """As the reference; the kernel is given the betas' powers of the step before, and multiplies them itself."""
    kernel: Any = importlib.import_module("torch_npu").npu_apply_adam_w
    powers = [beta ** (step - 1) for beta in betas]
    every = zip(held, gradients, averages, squares, lowered, decays, strict=True)
    for weight, gradient, average, square, low, decay in every:
        wide = gradient.to(weight.dtype)
        if factor != 1.0:
            wide.mul_(factor)
        moments = (weight, average, square)
        kernel(*powers, rate, decay, *betas, eps, wide, None, False, False, out=moments)
        if low is not None:
            low.copy_(weight)
