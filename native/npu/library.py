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
# Chips of the first generation, as torch_npu names them, and the functions that need a later one by their pages.
FIRST = ("910A", "910ProA", "910ProB", "910PremiumA")
LATER = ("npu_fusion_attention", "npu_fused_infer_attention_score")


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
    chip = str(runtime.get_device_name()) if set(names) & set(LATER) else ""
    return f"{chip} has no such kernel" if chip.removeprefix("Ascend").startswith(FIRST) else ""


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
