"""Attention on Ascend NPUs by CANN's npu_fusion_attention, which never writes the square of scores to memory.

Each mask is passed in the form that is fastest for the kernel: causal and sliding window as a compressed mask for all
lengths, documents as separate sequences, GLM's source as a prefix. Only combinations of them need a mask as large as
the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from native.fallback import report_fallback
from native.masks import EVERY_KEY, Dropout, Mask
from native.npu import library
from native.reference import attention as plain
from native.reference import hidden

# Sparse modes: the whole mask; causal with the last query at the last key; a band; causal with a prefix.
WHOLE, CAUSAL, BAND, PREFIX = 1, 3, 4, 6
# The size of the mask for modes 3 and 4 with any sequence length; mode 6 needs 1,024 more rows.
COMPRESSED = 2048
# The kernel's limits: width of a head, heads, batches with prefixes, sequences of mixed lengths, their tokens.
MOST_DIM, MOST_HEADS, MOST_PREFIXES, MOST_SEQUENCES, MOST_TOKENS = 768, 256, 32, 1024, 1 << 20
# Keys of `Mask.made` for numbers in CPU memory, which are read once per batch; the other keys are sizes.
_ENDS, _LENGTHS = (-1, -1), (-1, -2)

NEEDS = ("npu_fusion_attention",)
METHOD = "CANN's npu_fusion_attention"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    mask: Mask = EVERY_KEY,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return the attention; heads of `k` and `v` that several heads share are not repeated."""
    fault = _fault(q, k, causal, dropout)
    if fault:
        report_fallback("attention", "npu", fault)
        return plain(q, k, v, causal, mask, dropout)
    if causal and mask.documents is not None and not mask.window and mask.source is None:
        ends = _ends(mask, q, k)
        if ends:
            return _documents(q, k, v, ends)
    form = _form(q, k, mask) if causal else {}
    if not library.by_rows(q):
        return _call(q, k, v, q.shape[1], input_layout="BNSD", **form)
    rows, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    return _call(rows, keys, values, q.shape[1], input_layout="BSND", **form).transpose(1, 2)


def _fault(q: Tensor, k: Tensor, causal: bool, dropout: Dropout | None) -> str:
    if not library.has_type("npu_fusion_attention", q):
        return f"has no kernel for {q.dtype}"
    if dropout is not None:
        return "has no dropout that recomputation can repeat"
    if q.shape[-1] > MOST_DIM or q.shape[1] > MOST_HEADS:
        return f"supports at most {MOST_HEADS} heads of at most {MOST_DIM} numbers"
    if not q.numel() or not k.numel() or (causal and q.shape[-2] > k.shape[-2]):
        return "does not support queries without keys"
    return ""


def _call(q: Tensor, k: Tensor, v: Tensor, heads: int, **form: Any) -> Tensor:
    kernel = library.kernel("npu_fusion_attention")
    out: Tensor = kernel(q, k, v, heads, scale=q.shape[-1] ** -0.5, keep_prob=1.0, **form)[0]
    return out


def _form(q: Tensor, k: Tensor, mask: Mask) -> Mapping[str, object]:
    """Return the arguments that describe a causal attention with `mask`."""
    queries, keys = q.shape[-2], k.shape[-2]
    if mask.is_empty:
        return {"atten_mask": _future(q.device), "sparse_mode": CAUSAL}
    if mask.window and mask.documents is None and mask.source is None:
        band = {"pre_tockens": mask.window - 1, "next_tockens": 0}
        return {"atten_mask": _future(q.device), "sparse_mode": BAND, **band}
    if mask.source is not None and mask.documents is None and len(q) <= MOST_PREFIXES:
        if _LENGTHS not in mask.made:
            mask.made[_LENGTHS] = mask.source.cpu()
        # A prefix that the first query sees anyway has no effect, and is not allowed.
        prefix = [min(max(length, keys - queries), keys) for length in mask.made[_LENGTHS].tolist()]
        return {"atten_mask": _with_prefix(q.device), "sparse_mode": PREFIX, "prefix": prefix}
    return {"atten_mask": hidden(mask, queries, keys, q.device), "sparse_mode": WHOLE}


def _ends(mask: Mask, q: Tensor, k: Tensor) -> list[int]:
    """Return where the documents of all samples end in one row of tokens; [] if the kernel does not support them so."""
    if q.shape[-2] != k.shape[-2] or len(q) * q.shape[-2] > MOST_TOKENS or mask.documents is None:
        return []
    if _ENDS not in mask.made:
        mask.made[_ENDS] = _runs(mask.documents.cpu())
    ends: list[int] = mask.made[_ENDS].tolist()
    return ends if len(ends) <= MOST_SEQUENCES else []


def _runs(numbers: Tensor) -> Tensor:
    """Return the ends of runs of equal numbers, counted over all rows; an empty tensor if a number has two runs."""
    last = torch.ones_like(numbers, dtype=torch.bool)
    last[:, :-1] = numbers[:, 1:] != numbers[:, :-1]
    ends = last.flatten().nonzero().flatten() + 1
    places = torch.arange(len(numbers)).unsqueeze(1).expand_as(numbers)
    different = torch.stack((places, numbers.to(places.dtype)), -1).flatten(0, 1).unique(dim=0)
    return ends if len(different) == len(ends) else ends[:0]


def _documents(q: Tensor, k: Tensor, v: Tensor, ends: list[int]) -> Tensor:
    """Return the attention of every document to itself, with all documents as sequences in one row of tokens."""
    batch, heads, length, dim = q.shape
    rows, keys, values = (x.transpose(1, 2).reshape(batch * length, x.shape[1], dim) for x in (q, k, v))
    form: Mapping[str, object] = {
        "atten_mask": _future(q.device),
        "sparse_mode": CAUSAL,
        "input_layout": "TND",
    }
    out = _call(rows, keys, values, heads, actual_seq_qlen=ends, actual_seq_kvlen=ends, **form)
    return out.view(batch, length, heads, dim).transpose(1, 2)


@lru_cache(maxsize=8)
def _future(device: torch.device) -> Tensor:
    """Return a mask that is True where a key comes after a query: 4 MB, created once per device."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


@lru_cache(maxsize=8)
def _with_prefix(device: torch.device) -> Tensor:
    """Return the mask for prefixes: `_future` above 1,024 further rows whose left half is False."""
    below = torch.ones(COMPRESSED // 2, COMPRESSED, dtype=torch.bool, device=device)
    below[:, : COMPRESSED // 2] = False
    return torch.cat((_future(device), below))
