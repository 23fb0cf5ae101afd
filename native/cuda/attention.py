"""Attention on CUDA by torch's fused kernels, including FlashAttention."""

from __future__ import annotations

import torch

from native.sdpa import attention, describe

__all__ = ["attention", "describe", "why_not"]


def why_not() -> str:
    """Return why CUDA is not available here, or ""."""
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"
