"""Attention on Ascend NPUs by CANN's fused kernel, which never writes the square of scores to memory.

Written after Ascend's documentation and tested only with a stand-in: it has not run on an NPU yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

from native.reference import attention as plain

# The size of the mask that sparse_mode 3 needs, for any sequence length.
COMPRESSED = 2048
# The sparse_mode "rightDownCausal", in which the last query sees every key.
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
    """Return the attention; the reference computes what the kernel does not support (fp64, queries that see no key)."""
    if q.dtype not in TYPES or (causal and q.shape[-2] > k.shape[-2]):
        return plain(q, k, v, causal)
    kernel = importlib.import_module("torch_npu").npu_fusion_attention
    how = {"atten_mask": _future(q.device), "sparse_mode": LAST_ALIGNED} if causal else {}
    found = kernel(q, k, v, q.shape[1], input_layout="BNSD", scale=q.shape[-1] ** -0.5, keep_prob=1.0, **how)
    out: Tensor = found[0]
    return out


@lru_cache(maxsize=8)
def _future(device: torch.device) -> Tensor:
    """Return a mask that is True where a key comes after a query: 4 MB, created once per device."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)
