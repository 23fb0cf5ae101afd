"""AdamW on a CPU: one pass over all tensors of a step.

It reads gradients in fp32 or bf16, updates fp32 masters, and can also write the weights in bf16.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from native.compiled.library import load, why_not
from native.reference import adamw as plain
from native.update import AdamWStep

__all__ = ["adamw", "describe", "why_not"]


class _Tensor(ctypes.Structure):
    """The layout of `struct Tensor` in adamw.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gradient", "held", "average", "square", "lowered")),
        ("size", ctypes.c_int64),
        ("decay", ctypes.c_float),
        ("gradient_is_bf16", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in adamw.cpp."""

    _fields_ = (
        ("tensors", ctypes.POINTER(_Tensor)),
        ("count", ctypes.c_int64),
        *(
            (name, ctypes.c_float)
            for name in ("rate", "beta1", "beta2", "eps", "correction1", "correction2", "factor")
        ),
        ("threads", ctypes.c_int),
        ("level", ctypes.c_int),
    )


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"one pass over gradients, masters, moments and weights ({load().describe()})"


def adamw(update: AdamWStep) -> None:
    """Update the weights and moments; other types than fp32 and bf16 go to the reference."""
    if not all(_serves(*row) for row in update.rows()):
        plain(update)
        return
    update = replace(update, gradients=[gradient.contiguous() for gradient in update.gradients])
    tensors = (_Tensor * len(update.held))(
        *(
            _Tensor(
                gradient.data_ptr(),
                held.data_ptr(),
                average.data_ptr(),
                square.data_ptr(),
                None if low is None else low.data_ptr(),
                held.numel(),
                decay,
                gradient.dtype == torch.bfloat16,
            )
            for held, gradient, average, square, low, decay in update.rows()
        )
    )
    corrections = [1 - beta**update.step for beta in update.betas]
    numbers = (update.rate, *update.betas, update.eps, *corrections, update.factor)
    arguments = _Arguments(tensors, len(tensors), *numbers, max(1, torch.get_num_threads()), load().level)
    load().functions.native_adamw(ctypes.byref(arguments))


def _serves(
    held: Tensor, gradient: Tensor, average: Tensor, square: Tensor, lowered: Tensor | None, _: float
) -> bool:
    wide = held.device.type == "cpu" and all(
        x.dtype == torch.float32 and x.is_contiguous() for x in (held, average, square)
    )
    low = lowered is None or (lowered.dtype == torch.bfloat16 and lowered.is_contiguous())
    return wide and low and gradient.dtype in (torch.float32, torch.bfloat16)
