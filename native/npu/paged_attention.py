"""Attention of one new token per text over pages, on Ascend NPUs by CANN's npu_fused_infer_attention_score."""

from __future__ import annotations

from torch import Tensor

from native.fallback import report_fallback
from native.npu import library
from native.paging import PAGE, Reach
from native.reference import paged_attention as plain
from native.reference import store_in_pages as store_in_pages

# The kernel's limits: heads, heads that share keys, width of a head, numbers of all heads at one position, and numbers
# in all pages.
MOST_HEADS, MOST_SHARE, MOST_SIZE, MOST_WIDTH, MOST_NUMBERS = 256, 64, 512, 65535, 2**31 - 1

NEEDS = ("npu_fused_infer_attention_score",)
METHOD = "CANN's npu_fused_infer_attention_score"


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> Tensor:
    """Return the attention of one new token per text."""
    texts, heads, size = q.shape
    groups = keys.shape[2]
    fault = _fault(q, keys, reach)
    if fault or not texts:
        if fault:
            report_fallback("paged_attention", "npu", fault)
        return plain(q, keys, values, reach)
    # One query per text, (texts, 1, heads x size); pages of (16, groups x size).
    out, _ = library.kernel("npu_fused_infer_attention_score")(
        q.reshape(texts, 1, heads * size),
        keys.flatten(2),
        values.flatten(2),
        actual_seq_lengths_kv=list(reach.lengths),
        block_table=reach.tables.contiguous(),
        block_size=PAGE,
        num_heads=heads,
        num_key_value_heads=groups,
        scale=size**-0.5,
        input_layout="BSH",
    )
    result: Tensor = out.view(texts, heads, size)
    return result


def _fault(q: Tensor, keys: Tensor, reach: Reach) -> str:
    (_, heads, size), groups = q.shape, keys.shape[2]
    if not library.has_type("npu_fused_infer_attention_score", q):
        return f"has no kernel for {q.dtype}"
    if not reach.from_start:
        return "does not support a window"
    if keys.numel() > MOST_NUMBERS:
        return f"supports at most {MOST_NUMBERS:,} numbers of keys (a smaller --cache)"
    if heads > MOST_HEADS or heads // groups > MOST_SHARE or size > MOST_SIZE or groups * size > MOST_WIDTH:
        return (
            f"supports at most {MOST_HEADS} heads of at most {MOST_SIZE} numbers, {MOST_SHARE} per key head, "
            f"and {MOST_WIDTH:,} numbers of a position"
        )
    return ""
