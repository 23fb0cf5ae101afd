"""Find CANN's kernels: torch_npu's functions, or the reason why they cannot be called here.

The calls follow the pages of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu, commit 517f2e7) and are tested with
stand-ins that check every argument as these pages describe; nothing here has run on an NPU yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from native.fallback import report_fallback
from native.npu import facts

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


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
    if all(facts.types(name, chips()) for name in names):
        return ""
    series = "first generation" if chips() == "910" else f"{chips()} series"
    return f"chips of the {series} have no such kernel"


@cache
def chips() -> str:
    """Return the generation of this rank's NPU; "" for an unknown one, or without an NPU."""
    runtime = getattr(torch, "npu", None)
    return facts.generation(str(runtime.get_device_name())) if runtime is not None else ""


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


def computes(op: str, x: Tensor, kernel: str = "") -> bool:
    """Return whether CANN's kernel (`npu_` and the op) supports tensors like `x`.

    If not, it is reported once that the reference computes `op`.
    """
    if has_type(kernel or f"npu_{op}", x):
        # Several kernels of CANN refuse empty tensors, for which there is nothing to compute.
        return x.numel() > 0
    report_fallback(op, "npu", f"has no kernel for {x.dtype}")
    return False


def has_type(kernel: str, x: Tensor) -> bool:
    """Return whether a kernel computes in the type of `x` on this chip."""
    return NAMES.get(x.dtype) in facts.types(kernel, chips())


def by_rows(x: Tensor) -> bool:
    """Return whether x (batch, heads, rows, dim) lies in memory row by row, as the results of a matrix do.

    A kernel that takes the layout BSND then reads and writes it without a transposed copy.
    """
    return x.stride(1) < x.stride(2)


def takes_weight(kernel: str, x: Tensor, weight: Tensor) -> bool:
    """Return whether a kernel takes a weight of this type next to `x`."""
    wide = facts.KERNELS[kernel].weight == facts.OWN_OR_FP32
    return weight.dtype == x.dtype or (wide and weight.dtype == torch.float32)
