"""Attention on CUDA by torch's fused kernels; with dropout, the backward pass makes the mask again."""

from __future__ import annotations

import torch
from torch import Tensor

from native.masks import EVERY_KEY, Dropout, Mask
from native.philox import drawing
from native.sdpa import describe, fused

__all__ = ["attention", "describe", "why_not"]


def why_not() -> str:
    """Return why CUDA is not available here, or ""."""
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    mask: Mask = EVERY_KEY,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return the attention; with dropout, the backward pass makes the mask again from the generator's saved state."""
    if dropout is None:
        return fused(q, k, v, causal, mask)
    with drawing(dropout, q.device):
        return fused(q, k, v, causal, mask, dropout.chance)
