"""AdamW on a CPU: all tensors in one pass, from gradients in bf16 to weights in bf16 beside fp32 masters."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from native.cpu.library import load, why_not
from native.reference import adamw as plain

__all__ = ["adamw", "merit", "why_not"]


class _Tensor(ctypes.Structure):
    """As `struct Tensor` in adamw.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gradient", "held", "average", "square", "lowered")),
        ("size", ctypes.c_int64),
        ("decay", ctypes.c_float),
        ("gradient_is_bf16", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    """As `struct Arguments` in adamw.cpp."""

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


def merit() -> str:
    """What a report says of this backend."""
    return f"one pass over gradients, masters, moments and weights ({load().describe()})"


def adamw(
    held: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    lowered: Sequence[Tensor | None],
    decays: Sequence[float],
    step: int,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    factor: float = 1.0,
) -> None:
    """As the reference, which serves other types than fp32 and bf16."""
    given = (held, gradients, averages, squares, lowered)
    if not all(_serves(*tensors) for tensors in zip(*given, strict=True)):
        plain(held, gradients, averages, squares, lowered, decays, step, rate, betas, eps, factor)
        return
    gradients = [gradient.contiguous() for gradient in gradients]
    rows = zip(held, gradients, averages, squares, lowered, decays, strict=True)
    tensors = (_Tensor * len(held))(
        *(
            _Tensor(
                gradient.data_ptr(),
                one.data_ptr(),
                average.data_ptr(),
                square.data_ptr(),
                None if low is None else low.data_ptr(),
                one.numel(),
                decay,
                gradient.dtype == torch.bfloat16,
            )
            for one, gradient, average, square, low, decay in rows
        )
    )
    corrections = [1 - beta**step for beta in betas]
    numbers = (rate, *betas, eps, *corrections, factor)
    arguments = _Arguments(tensors, len(held), *numbers, max(1, torch.get_num_threads()), load().level)
    load().functions.native_adamw(ctypes.byref(arguments))


def _serves(held: Tensor, gradient: Tensor, average: Tensor, square: Tensor, lowered: Tensor | None) -> bool:
    wide = held.device.type == "cpu" and all(
        x.dtype == torch.float32 and x.is_contiguous() for x in (held, average, square)
    )
    low = lowered is None or (lowered.dtype == torch.bfloat16 and lowered.is_contiguous())
    return wide and low and gradient.dtype in (torch.float32, torch.bfloat16)
