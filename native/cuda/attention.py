"""Attention on CUDA by torch's fused kernels, which never write the square of scores to memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from native.reference import future


def why_not() -> str:
    """Return why there is no CUDA here, or an empty string."""
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "torch's fused attention"


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Return the attention; with fewer queries than keys it passes a mask, because torch aligns at the first key."""
    queries, keys = q.shape[-2], k.shape[-2]
    mask = ~future(queries, keys, q.device) if causal and queries != keys else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and queries == keys)
