"""Stands in for torch_npu on a node without NPUs: the names that the trainer calls, on a CPU's memory.

As the true one, it is loaded by `import torch` itself, makes `torch.npu`, and brings the process group `hccl`. What was
called, and with what, is kept in the file that NPU_CALLS names, one JSON object a line.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _autoload() -> None:
    """What the entry point of `torch.backends` calls; importing was enough."""


def note(call: str, **what: Any) -> None:
    path = os.environ.get("NPU_CALLS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps({"call": call, "rank": os.environ.get("RANK", "0"), **what}) + "\n")


LIBRARY = Path(os.environ["NPU_LIBRARY"])
torch.ops.load_library(str(LIBRARY))
_library = ctypes.CDLL(str(LIBRARY))
_library.npu_highest.restype = ctypes.c_size_t


class _Event:
    """Work is never queued here, so an event is a clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.at = enable_timing, 0.0

    def record(self) -> None:
        import time

        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        if not (self.timed and later.timed):
            raise RuntimeError("an event was made without enable_timing")
        return (later.at - self.at) * 1000


def _set_device(index: int) -> None:
    note("set_device", index=index)
    _library.npu_set_device(int(index))


CHIP = os.environ.get("NPU_CHIP", "Ascend910B3")

npu = SimpleNamespace(
    Event=_Event,
    is_available=lambda: True,
    is_initialized=lambda: True,
    init=lambda: None,
    device_count=lambda: len(os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0,1").split(",")),
    current_device=lambda: int(_library.npu_device()),
    set_device=_set_device,
    synchronize=lambda *_: None,
    max_memory_allocated=lambda *_: int(_library.npu_highest()),
    mem_get_info=lambda *_: (8 << 30, 64 << 30),
    get_device_name=lambda *_: CHIP,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
    manual_seed_all=lambda seed: None,
    _is_in_bad_fork=lambda: False,
    device=lambda index: torch.device("npu", index),
)

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)


def npu_fusion_attention(*given: Any, **named: Any) -> Any:
    """As `_noted`, with what the trainer's tests compare."""
    form = {name: named.get(name, 0) for name in ("input_layout", "scale", "sparse_mode")}
    note("npu_fusion_attention", head_num=given[3], **form)
    return documented.npu_fusion_attention(*given, **named)


def _noted(name: str) -> Any:
    """The documented function, which also writes down that it was called."""

    def call(*given: Any, **named: Any) -> Any:
        note(name)
        return getattr(documented, name)(*given, **named)

    return call


npu_rms_norm = _noted("npu_rms_norm")
npu_add_rms_norm = _noted("npu_add_rms_norm")
npu_add_layer_norm = _noted("npu_add_layer_norm")
npu_swiglu = _noted("npu_swiglu")
for _name in ("npu_rms_norm_backward", "npu_gelu_backward", "npu_swiglu_backward"):
    setattr(torch.ops.npu, _name, _noted(_name))
npu_gelu = _noted("npu_gelu")
npu_cross_entropy_loss = _noted("npu_cross_entropy_loss")
npu_rotary_mul = _noted("npu_rotary_mul")
npu_grouped_matmul = _noted("npu_grouped_matmul")
npu_fused_infer_attention_score = _noted("npu_fused_infer_attention_score")


def npu_apply_adam_w(*given: Any, **named: Any) -> Any:
    """As `_noted`, with what the trainer's tests compare."""
    note("npu_apply_adam_w", beta1_power=given[0], lr=given[2], weight_decay=given[3])
    return documented.npu_apply_adam_w(*given, **named)


def npu_fast_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), as Ascend documents it."""
    note("npu_fast_gelu")
    return x * torch.sigmoid(1.702 * x)


import documented_kernels as documented  # noqa: E402

from torch_npu import hccl  # noqa: E402

hccl.register(note)
