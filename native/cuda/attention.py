"""Attention on CUDA by torch's fused kernels, among them FlashAttention."""

from __future__ import annotations

import torch

from native.sdpa import attention, describe

__all__ = ["attention", "describe", "why_not"]


def why_not() -> str:
    """Return why there is no CUDA here, or an empty string."""
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"
