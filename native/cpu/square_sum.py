"""The sum of the squares of several tensors on a CPU: each is read once, and bf16 is not copied to fp32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from native.compiled.library import load, why_not
from native.reference import square_sum as plain

__all__ = ["describe", "square_sum", "why_not"]

_TYPES = (torch.float32, torch.bfloat16)


class _Tensor(ctypes.Structure):
    """The layout of `struct Tensor` in square_sum.cpp."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int),
    )


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"each tensor read once ({load().describe()})"


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all squares; the reference computes other types than fp32 and bf16."""
    if not tensors or not all(x.dtype in _TYPES and x.device.type == "cpu" for x in tensors):
        return plain(tensors)
    dense = [x.contiguous() for x in tensors]
    functions = load().functions
    functions.native_square_sum_piece.restype = ctypes.c_int64
    piece = int(functions.native_square_sum_piece())
    counts = [-(-x.numel() // piece) for x in dense]
    sums = torch.zeros(sum(counts), dtype=torch.float64)
    rows, start = [], sums.data_ptr()
    for x, count in zip(dense, counts, strict=True):
        rows.append(_Tensor(x.data_ptr(), x.numel(), start, x.dtype == torch.bfloat16))
        start += count * sums.element_size()
    functions.native_square_sum(
        (_Tensor * len(rows))(*rows), ctypes.c_int64(len(rows)), max(1, torch.get_num_threads()), load().level
    )
    return sums.sum().float()
