"""Find CANN's kernels: torch_npu's functions, or the reason why they cannot be called here.

The calls follow the pages of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu, commit 517f2e7) and are tested with
stand-ins that check every argument as these pages describe; nothing here has run on an NPU yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from native.fallback import report_fallback

TYPES = (torch.float16, torch.bfloat16, torch.float32)
# The first generation (Atlas training products) as CANN names it: an Ascend910B without a digit belongs to it.
FIRST = ("910A", "910B", "910ProA", "910ProB", "910PremiumA")
# Functions without it in the list of products of their pages, or of the pages of the kernels that they call
# (hicann/ops-nn, commit e5c3fa9: aclnnRmsNorm, aclnnAddLayerNorm, ..., forward or backward).
LATER = frozenset(
    f"npu_{name}"
    for name in (
        "add_layer_norm", "add_rms_norm", "cross_entropy_loss", "fused_infer_attention_score", "fusion_attention",
        "grouped_matmul", "rms_norm", "swiglu",
    )
)  # fmt: skip


def why_not(*names: str) -> str:
    """Return why these functions of torch_npu cannot be called here, or ""."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    runtime = getattr(torch, "npu", None)
    if runtime is None or not runtime.is_available():
        return "torch sees no NPU"
    absent = [name for name in names if _found(name) is None]
    if absent:
        return f"this torch_npu has no {', '.join(absent)}"
    return "chips of the first generation have no such kernel" if LATER & set(names) and is_first() else ""


def is_first() -> bool:
    """Return whether this rank's NPU is of the first generation."""
    return str(torch.npu.get_device_name()).removeprefix("Ascend") in FIRST  # type: ignore[attr-defined]


def describe(method: str) -> str:
    """Return the description of an op by CANN: its method."""
    return method


def kernel(name: str) -> Callable[..., Any]:
    """Return a function of torch_npu; `why_not` must have found it."""
    function = _found(name)
    assert function is not None, name
    return function


def _found(name: str) -> Callable[..., Any] | None:
    # The module has most functions; backward functions are only among torch's ops.
    own = getattr(importlib.import_module("torch_npu"), name, None)
    found: Callable[..., Any] | None = own if own is not None else getattr(torch.ops.npu, name, None)
    return found


def computes(op: str, x: Tensor) -> bool:
    """Return whether CANN's kernels support tensors like `x`; if not, report once that the reference computes `op`."""
    if x.dtype not in TYPES:
        report_fallback(op, "npu", f"has no kernel for {x.dtype}")
        return False
    # Several kernels of CANN refuse empty tensors, for which there is nothing to compute.
    return x.numel() > 0
