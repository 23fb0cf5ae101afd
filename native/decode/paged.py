"""Keys and values in pages, and attention over them; a token's result is the same in every batch."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from native.compiled.arguments import FLOAT, INT, POINTER, SIZE, function, structure
from native.compiled.library import load, why_not
from native.compiled.op import address
from native.paging import PAGE
from native.reference import capped, shares

__all__ = ["PAGE", "Spans", "attend", "store", "why_not"]

TILE = 8


class _Batch(ctypes.Structure):
    """The layout of `struct Batch` in paged.h."""

    _fields_ = structure(
        (POINTER, "q out keys values tables begins first last scratch"),
        (SIZE, "q_stride table_stride room sequences heads groups size"),
        (FLOAT, "scale"),
        (INT, "threads level"),
        (POINTER, "rounded"),
    )


@dataclass(frozen=True)
class Spans:
    """The sequence of each new token, and the positions that it sees; all tensors are int32 except the slots."""

    tables: Tensor
    """(sequences, pages): the pages of each sequence, in order."""
    begins: Tensor
    """(sequences + 1): the index of each sequence's first new token."""
    first: Tensor
    """(tokens): the first position that a token sees."""
    last: Tensor
    """(tokens): the position after the last one that a token sees."""
    slots: Tensor
    """(tokens), int64: where the token's key and value are stored: 16 x page + offset."""
    longest: int
    """The largest of `last`."""


def pages(count: int, groups: int, size: int, shared: int = 0) -> tuple[Tensor, Tensor]:
    """Return empty pages of one layer: keys (pages, groups, size, 16), values (pages, groups, 16, size).

    `shared`: values are these first numbers of keys, and have no memory of their own.
    """
    if shared:
        keys = torch.zeros(count, groups, size, PAGE)
        return keys, keys[:, :, :shared].transpose(2, 3)
    return torch.zeros(count, groups, size, PAGE), torch.zeros(count, groups, PAGE, size)


def store(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Store the keys and values of new tokens, (tokens, groups, size), in their slots."""
    if why_not():
        page, offset = slots // PAGE, slots % PAGE
        key_pages[page, :, :, offset] = keys
        value_pages[page, :, offset] = values
        return
    tokens, groups, size = keys.shape
    if keys.stride(2) != 1 or keys.stride(1) != size or values.stride() != keys.stride():
        keys, values = keys.contiguous(), values.contiguous()
    pages = map(address, (key_pages, value_pages, slots))
    run = function("native_paged_store", None, *(POINTER,) * 2, SIZE, *(POINTER,) * 3, *(SIZE,) * 3)
    run(keys.data_ptr(), values.data_ptr(), keys.stride(0), *pages, tokens, groups, size)


def attend(q: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Spans, scale: float) -> Tensor:
    """Return the attention of each new token, (tokens, heads, size), over the positions that it sees."""
    if why_not():
        return reference(q, key_pages, value_pages, spans, scale)
    tokens, heads, size = q.shape
    if q.stride(2) != 1 or q.stride(1) != size:
        q = q.contiguous()
    out = torch.empty(tokens, heads, size)
    threads = torch.get_num_threads()
    room = -(-spans.longest // PAGE) * PAGE
    scratch = torch.empty(threads * TILE * room)
    places = (spans.tables, spans.begins, spans.first, spans.last)
    pointers = map(address, (q, out, key_pages, value_pages, *places, scratch))
    strides = (q.stride(0), spans.tables.stride(0))
    sizes = (room, len(spans.tables), heads, key_pages.shape[1], size)
    batch = _Batch(*pointers, *strides, *sizes, scale, threads, load().level)
    function("native_paged_attention", None, POINTER)(ctypes.byref(batch))
    return out


def reference(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    spans: Spans,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the same as `attend`, computed in plain torch; `cap`, `sinks`: as in `native.reference.attention`."""
    out, begins = q.new_empty(*q.shape[:2], value_pages.shape[-1]), spans.begins.tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(begins)):
        table = spans.tables[number, : -(-int(spans.last[begin:end].max()) // PAGE)].long()
        keys = key_pages[table].permute(1, 2, 0, 3).flatten(2)  # (groups, size, positions)
        values = value_pages[table].permute(1, 0, 2, 3).flatten(1, 2)  # (groups, positions, size)
        share = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(share, 0), values.repeat_interleave(share, 0)
        scores = capped((q[begin:end].transpose(0, 1) @ keys) * scale, cap)  # (heads, tokens, positions)
        at = torch.arange(keys.shape[2])
        hidden = (at < spans.first[begin:end, None]) | (at >= spans.last[begin:end, None])
        mixed = shares(scores.masked_fill(hidden, float("-inf")), sinks) @ values
        out[begin:end] = mixed.transpose(0, 1)
    return out
