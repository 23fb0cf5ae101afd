"""Attention on Ascend NPUs: CANN's fused kernel, which never writes the square of scores to memory.

Written to Ascend's documents and run against a stand-in only: no NPU has seen it yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

from native.reference import attention as plain

# Rows and columns of the mask that sparse_mode 3 wants, whatever the sequence.
COMPRESSED = 2048
# sparse_mode rightDownCausal: the last query sees every key.
LAST_ALIGNED = 3
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not() -> str:
    """Return why there is no NPU here, or an empty string."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    runtime = getattr(torch, "npu", None)
    return "" if runtime is not None and runtime.is_available() else "torch sees no NPU"


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "CANN's fused attention"


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """As the reference; what the kernel does not take (fp64, a hidden query) goes the reference's way."""
    if q.dtype not in TYPES or (causal and q.shape[-2] > k.shape[-2]):
        return plain(q, k, v, causal)
    kernel = importlib.import_module("torch_npu").npu_fusion_attention
    how = {"atten_mask": _future(q.device), "sparse_mode": LAST_ALIGNED} if causal else {}
    found = kernel(q, k, v, q.shape[1], input_layout="BNSD", scale=q.shape[-1] ** -0.5, keep_prob=1.0, **how)
    out: Tensor = found[0]
    return out


@lru_cache(maxsize=8)
def _future(device: torch.device) -> Tensor:
    """True where a key comes after a query: 4 MB, made once a device."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)
