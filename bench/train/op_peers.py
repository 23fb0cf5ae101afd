"""The same ops by other projects: Liger and apex on GPUs, DeepSpeed's AdamW for CPUs; each only if it is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Liger is the package liger-kernel; apex is built from NVIDIA's sources.
LIGER, APEX = "liger_kernel.transformers.functional", "apex.normalization.fused_layer_norm"


def peers_of(op: str, shape: Sequence[int]) -> dict[str, Callable[..., Any]]:
    """Return the functions of other projects for a GPU, which take and return what ours do.

    shape: of a case, whose last number is the width of a norm.
    """
    found = {}
    for name, module, make in (("liger", LIGER, _liger), ("apex", APEX, _apex)):
        with contextlib.suppress(ModuleNotFoundError):
            functions = make(importlib.import_module(module), shape)
            if op in functions:
                found[name] = functions[op]
    return found


def _liger(liger: Any, _: Sequence[int]) -> dict[str, Callable[..., Any]]:
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        normal, added = liger.liger_fused_add_rms_norm(x, residual, weight, eps, in_place=False)
        return added, normal

    def rotary(q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        # It wants an angle for each number of a head, and overwrites queries and keys.
        angles = (torch.cat((each, each), -1)[:, 0].detach().to(q.dtype) for each in (cosines, sines))
        rotated: tuple[Tensor, Tensor] = liger.liger_rope(q, k, *angles)
        return rotated

    return {
        "layer_norm": lambda x, weight, bias, eps=1e-5: liger.liger_layer_norm(x, weight, bias, eps),
        "rms_norm": lambda x, weight, eps=1e-5: liger.liger_rms_norm(x, weight, eps, in_place=False),
        "add_rms_norm": add_rms_norm,
        "swiglu": lambda x: liger.liger_swiglu(*(part.contiguous() for part in x.chunk(2, -1))),
        "rotary": rotary,
        "cross_entropy": lambda logits, targets: liger.liger_cross_entropy(logits, targets).float(),
        "linear_cross_entropy": lambda x, weight, targets, vocabulary: liger.liger_fused_linear_cross_entropy(
            x, weight[:vocabulary], targets
        ).float(),
    }


def _apex(apex: Any, shape: Sequence[int]) -> dict[str, Callable[..., Any]]:
    width = (shape[-1],)
    return {
        "layer_norm": lambda x, weight, bias, eps=1e-5: apex.fused_layer_norm_affine(
            x, weight, bias, width, eps
        ),
        "rms_norm": lambda x, weight, eps=1e-5: apex.fused_rms_norm_affine(x, weight, width, eps),
    }


class OtherAdamW:
    """A step of another project's AdamW over fp32 masters: gradients are widened before, weights rounded after."""

    def __init__(self, make: Callable[..., Any], masters: Sequence[Tensor], rate: float) -> None:
        self.masters = [torch.nn.Parameter(each.clone()) for each in masters]
        self.optimizer = make(self.masters, lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for master in self.masters:
            master.grad = torch.empty_like(master)

    def step(self, gradients: Sequence[Tensor], lowered: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            for master, gradient in zip(self.masters, gradients, strict=True):
                if gradient.dtype == master.dtype:
                    master.grad = gradient
                else:
                    assert master.grad is not None
                    master.grad.copy_(gradient)
            self.optimizer.step()
            for master, low in zip(self.masters, lowered, strict=True):
                if low is not None:
                    low.copy_(master)


def adamw_of() -> tuple[str, Callable[..., Any]] | None:
    """Return DeepSpeed's AdamW for CPUs and its name, or None if it is not installed.

    DeepSpeed compiles its kernel at the first use, which takes a minute.
    """
    with contextlib.suppress(ModuleNotFoundError):
        return "deepspeed", importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return None
