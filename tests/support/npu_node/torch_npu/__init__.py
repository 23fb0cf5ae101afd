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


npu = SimpleNamespace(
    Event=_Event,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: len(os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0,1").split(",")),
    current_device=lambda: int(_library.npu_device()),
    set_device=_set_device,
    synchronize=lambda *_: None,
    max_memory_allocated=lambda *_: int(_library.npu_highest()),
    get_device_name=lambda *_: "Ascend910B3",
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
    manual_seed_all=lambda seed: None,
    _is_in_bad_fork=lambda: False,
    device=lambda index: torch.device("npu", index),
)

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Any, ...]:
    """As Ascend documents it, for the layout BNSD and the modes 0 and 3; anything else is refused as there."""
    note(
        "npu_fusion_attention",
        head_num=head_num,
        input_layout=input_layout,
        scale=scale,
        sparse_mode=sparse_mode,
    )
    if input_layout != "BNSD" or query.dim() != 4 or query.shape[1] != head_num:
        raise RuntimeError(f"input_layout {input_layout} with {tuple(query.shape)} and {head_num} heads")
    if sparse_mode not in (0, 3) or (sparse_mode == 3) != (atten_mask is not None):
        raise RuntimeError(f"sparse_mode {sparse_mode} with atten_mask {atten_mask is not None}")
    scores = query @ key.transpose(2, 3) * scale
    if atten_mask is not None:
        if atten_mask.dtype != torch.bool or tuple(atten_mask.shape) != (2048, 2048):
            raise RuntimeError("sparse_mode 3 wants the compressed mask: bool, 2048 x 2048")
        rows, columns = scores.shape[2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows).to(query.device)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = scores.float().softmax(-1).to(query.dtype) @ value
    empty = query.new_zeros(0)
    return out, empty, empty, empty, 0, 0, 0


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """As Ascend documents it: the powers are those of the step before."""
    note("npu_apply_adam_w", beta1_power=beta1_power, lr=lr, weight_decay=weight_decay)
    weight, mean, square = out
    mean.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    deviation = (square / (1 - beta2_power * beta2)).sqrt().add_(epsilon)
    weight.mul_(1 - lr * weight_decay).addcdiv_(mean, deviation, value=-lr / (1 - beta1_power * beta1))
    return out


def npu_fast_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), as Ascend documents it."""
    note("npu_fast_gelu")
    return x * torch.sigmoid(1.702 * x)


from torch_npu import hccl  # noqa: E402

hccl.register(note)
