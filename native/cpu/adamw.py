"""AdamW on a CPU: one pass over all tensors of a step.

It reads gradients in fp32 or bf16, updates fp32 masters or their bf16 weights with remainders, and can also write the
weights in bf16. Clipping and the division by the loss scale are one factor in the same pass.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from native.compiled.arguments import FLOAT, INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import kernel
from native.fallback import report_fallback
from native.reference import adamw as plain
from native.update import AdamWStep


class _Tensor(ctypes.Structure):
    """The layout of `struct Tensor` in adamw.cpp."""

    _fields_ = structure(
        (POINTER, "gradient held average square lowered remainder"),
        (SIZE, "size"),
        (FLOAT, "decay"),
        (INT, "gradient_is_bf16"),
    )


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in adamw.cpp."""

    _fields_ = structure(
        (ctypes.POINTER(_Tensor), "tensors"),
        (SIZE, "count"),
        (FLOAT, "rate beta1 beta2 eps correction1 correction2 factor"),
        (INT, "threads level"),
    )


METHOD = "one pass over gradients, masters, moments and weights"


def adamw(update: AdamWStep) -> None:
    """Update the weights and moments; other types than fp32 and bf16 go to the reference."""
    compact = [remainder is not None for remainder in update.remainders] or [False] * len(update.held)
    if not all(_serves(split, *row) for split, row in zip(compact, update.rows(), strict=True)):
        report_fallback("adamw", "cpu", "takes only contiguous tensors of fp32 and bf16")
        plain(update)
        return
    update = replace(update, gradients=[gradient.contiguous() for gradient in update.gradients])
    remainders = update.remainders or [None] * len(update.held)
    rows = zip(update.rows(), remainders, strict=True)
    tensors = (_Tensor * len(update.held))(*(_tensor(*row, remainder) for row, remainder in rows))
    corrections = [1 - beta**update.step for beta in update.betas]
    numbers = (update.rate, *update.betas, update.eps, *corrections, update.factor)
    arguments = _Arguments(tensors, len(tensors), *numbers, max(1, torch.get_num_threads()), load().level)
    kernel("native_adamw", None, POINTER)(ctypes.byref(arguments))


def _tensor(
    held: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    lowered: Tensor | None,
    decay: float,
    remainder: Tensor | None,
) -> _Tensor:
    """Return the addresses of one tensor; with a remainder, `held` is the bf16 weight."""
    low = lowered if remainder is None else held
    return _Tensor(
        gradient.data_ptr(),
        held.data_ptr() if remainder is None else None,
        average.data_ptr(),
        square.data_ptr(),
        None if low is None else low.data_ptr(),
        None if remainder is None else remainder.data_ptr(),
        held.numel(),
        decay,
        gradient.dtype == torch.bfloat16,
    )


def _serves(
    split: bool,
    held: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    lowered: Tensor | None,
    _: float,
) -> bool:
    right = held.dtype == (torch.bfloat16 if split else torch.float32) and held.is_contiguous()
    wide = all(x.dtype == torch.float32 and x.is_contiguous() for x in (average, square))
    wide = wide and right and held.device.type == "cpu"
    low = lowered is None or (lowered.dtype == torch.bfloat16 and lowered.is_contiguous())
    return wide and low and gradient.dtype in (torch.float32, torch.bfloat16)
