"""Attention of one new token per text over keys and values in pages, on CUDA.

A program reads a range of one text's keys once for all heads that share them. Different programs compute the ranges of
a text, because with few texts most of a GPU would otherwise be idle; a second kernel joins their results. The number of
ranges follows from the width of the tables of pages, so that a captured graph serves texts of any length below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.language import jit, on_device, tl, width_of
from native.paging import PAGE, Reach
from native.reference import paged_attention as plain
from native.reference import store_in_pages as plain_store

# How many positions a program reads, in total and at a time.
STRETCH, BLOCK = 256, 32
# The smallest number of rows that Triton multiplies.
LEAST_ROWS = 16
# The widest head that fits into a program's registers.
MOST_SIZE = 256

METHOD = "pages are read once for all heads that share them"


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> Tensor:
    """Return the attention of one new token per text."""
    texts, heads, size = q.shape
    groups = keys.shape[2]
    if not language.computes("paged_attention", q) or size > MOST_SIZE or not texts:
        return plain(q, keys, values, reach)
    q, tables = q if q.stride(2) == 1 else q.contiguous(), reach.tables.contiguous()
    stretches = -(-tables.shape[1] * PAGE // STRETCH)
    out = torch.empty(texts, heads, size, dtype=q.dtype, device=q.device)
    mixed, tops, sums = out, out, out
    if stretches > 1:
        mixed = torch.empty(stretches, texts, heads, size, dtype=torch.float32, device=q.device)
        tops, sums = torch.empty(2, stretches, texts, heads, dtype=torch.float32, device=q.device)
    given = (q, keys, values, tables, reach.first, reach.last, out, mixed, tops, sums)
    numbers = (texts, heads, groups, size, tables.shape[1], q.stride(0), q.stride(1), size**-0.5)
    wide = q.dtype == torch.float32
    rows = max(LEAST_ROWS, width_of(heads // groups))
    with on_device(q):
        _stretch[texts, groups, stretches](
            *given,
            *numbers,
            ROWS=rows,
            WIDTH=max(16, width_of(size)),
            STRETCH=STRETCH,
            # Products of fp32 need more registers.
            BLOCK=BLOCK // 2 if wide else BLOCK,
            PAGE=PAGE,
            ONE=stretches == 1,
            num_warps=16 if wide else 4,
        )
        if stretches > 1:
            _join[(texts * heads,)](
                out, mixed, tops, sums, texts * heads, size, stretches, WIDTH=width_of(size)
            )
    return out


def store_in_pages(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store the keys and values of tokens, (tokens, groups, dim), at their slots of the pages."""
    tokens, groups, size = k.shape
    if not language.computes("paged_attention", k) or (k.stride(2), v.stride(2)) != (1, 1):
        plain_store(keys, values, k, v, slots)
        return
    with on_device(k):
        strides = *k.stride()[:2], *v.stride()[:2]
        _store[tokens, groups](keys, values, k, v, slots, groups, size, *strides, WIDTH=width_of(size))


@jit
def _stretch(
    q_at: tl.tensor, keys_at: tl.tensor, values_at: tl.tensor, tables_at: tl.tensor, first_at: tl.tensor,
    last_at: tl.tensor, out_at: tl.tensor, mixed_at: tl.tensor, tops_at: tl.tensor, sums_at: tl.tensor,
    texts: tl.tensor, heads: tl.tensor, groups: tl.tensor, size: tl.tensor, pages: tl.tensor,
    q_text: tl.tensor, q_head: tl.tensor, scale: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STRETCH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, ONE: tl.constexpr,
) -> None:  # fmt: skip
    text = tl.program_id(0)
    group = tl.program_id(1)
    stretch = tl.program_id(2)
    begin = tl.maximum(tl.load(first_at + text), stretch * STRETCH)
    end = tl.minimum(tl.load(last_at + text), (stretch + 1) * STRETCH)
    own = heads // groups
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    lane = tl.arange(0, BLOCK)
    known = column < size
    inside = (row < own)[:, None] & known[None, :]
    q_at += text.to(tl.int64) * q_text + group * own * q_head
    q = tl.load(q_at + row[:, None] * q_head + column[None, :], inside, 0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin // BLOCK * BLOCK, end, BLOCK):
        at = start + lane
        seen = (at >= begin) & (at < end)
        page = tl.load(tables_at + text * pages + at // PAGE, seen, 0).to(tl.int64)
        place = ((page * PAGE + at % PAGE) * groups + group) * size
        both = seen[:, None] & known[None, :]
        keys = tl.load(keys_at + place[:, None] + column[None, :], both, 0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        odds = tl.exp(scores - higher[:, None])
        rest = tl.exp(top - higher)
        values = tl.load(values_at + place[:, None] + column[None, :], both, 0.0)
        mixed = tl.dot(odds.to(values.dtype), values, mixed * rest[:, None], input_precision="ieee")
        total = total * rest + tl.sum(odds, 1)
        top = higher
    to = (stretch.to(tl.int64) * texts + text) * heads + group * own + row
    if ONE:
        mixed = mixed / total[:, None]
        tl.store(out_at + to[:, None] * size + column[None, :], mixed.to(out_at.dtype.element_ty), inside)
    else:
        tl.store(mixed_at + to[:, None] * size + column[None, :], mixed, inside)
        tl.store(tops_at + to, top, row < own)
        tl.store(sums_at + to, total, row < own)


@jit
def _join(
    out_at: tl.tensor, mixed_at: tl.tensor, tops_at: tl.tensor, sums_at: tl.tensor, heads: tl.tensor,
    size: tl.tensor, stretches: tl.tensor, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    top = -float("inf")
    total = 0.0
    mixed = tl.zeros([WIDTH], tl.float32)
    for stretch in range(0, stretches):
        at = head + stretch * heads
        own = tl.load(tops_at + at)
        # A range without keys has the maximum -infinity, and contributes nothing.
        if own > -float("inf"):
            higher = tl.maximum(top, own)
            rest = tl.exp(top - higher)
            share = tl.exp(own - higher)
            mixed = mixed * rest + tl.load(mixed_at + at * size + column, column < size, 0.0) * share
            total = total * rest + tl.load(sums_at + at) * share
            top = higher
    tl.store(out_at + head * size + column, (mixed / total).to(out_at.dtype.element_ty), column < size)


@jit
def _store(
    keys_at: tl.tensor, values_at: tl.tensor, k_at: tl.tensor, v_at: tl.tensor, slots_at: tl.tensor,
    groups: tl.tensor, size: tl.tensor, k_token: tl.tensor, k_group: tl.tensor, v_token: tl.tensor,
    v_group: tl.tensor, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0)
    group = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    target = (tl.load(slots_at + token).to(tl.int64) * groups + group) * size + column
    k = tl.load(k_at + token.to(tl.int64) * k_token + group * k_group + column, column < size, 0.0)
    v = tl.load(v_at + token.to(tl.int64) * v_token + group * v_group + column, column < size, 0.0)
    tl.store(keys_at + target, k.to(keys_at.dtype.element_ty), column < size)
    tl.store(values_at + target, v.to(values_at.dtype.element_ty), column < size)
