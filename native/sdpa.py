"""Attention by torch's fused kernels, which never write the square of scores to memory."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from native.fallback import report_fallback
from native.masks import EVERY_KEY, Dropout, Mask
from native.reference import attention as plain
from native.reference import hidden


def why_not() -> str:
    """Return "": torch's attention runs wherever torch runs."""
    return ""


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "torch's fused attention"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    mask: Mask = EVERY_KEY,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return the attention; the reference computes it with dropout, so that recomputation can repeat it."""
    if dropout is not None:
        reason = "has no dropout that recomputation can repeat"
        report_fallback("attention", "torch", reason)
        return plain(q, k, v, causal, mask, dropout)
    return fused(q, k, v, causal, mask)


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask, chance: float = 0.0) -> Tensor:
    """Return the attention; `chance` is that of a dropout which torch's generator of the device draws."""
    queries, keys = q.shape[-2], k.shape[-2]
    # Torch aligns the first query with the first key, and has no option for other masks.
    masked = causal and (queries != keys or not mask.is_empty)
    seen = ~hidden(mask, queries, keys, q.device) if masked else None
    shared = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, dropout_p=chance, is_causal=causal and not masked, enable_gqa=shared
    )
