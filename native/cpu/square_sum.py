"""The sum of the squares of several tensors on a CPU: each is read once, without an fp32 copy of bf16."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from native.compiled.arguments import INT, POINTER, SIZE, function, structure
from native.compiled.library import load
from native.compiled.op import SUFFIX, kernel, register
from native.fallback import report_fallback
from native.reference import square_sum as plain


class _Tensor(ctypes.Structure):
    """The layout of `struct Tensor` in square_sum.cpp."""

    _fields_ = structure((POINTER, "at"), (SIZE, "size"), (POINTER, "sums"), (INT, "is_bf16"))


METHOD = "each tensor read once"


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all squares; the reference computes other types than fp32 and bf16."""
    if not tensors:
        return plain(tensors)
    if not all(x.dtype in SUFFIX and x.device.type == "cpu" for x in tensors):
        types = sorted({str(x.dtype) for x in tensors})
        report_fallback("square_sum", "cpu", f"has no kernel for one of {', '.join(types)}")
        return plain(tensors)
    total: Tensor = _OP(list(tensors))
    return total


def _compute(tensors: Sequence[Tensor]) -> Tensor:
    dense = [x.contiguous() for x in tensors]
    piece = function("native_square_sum_piece", SIZE)()
    counts = [-(-x.numel() // piece) for x in dense]
    sums = torch.zeros(sum(counts), dtype=torch.float64)
    rows, start = [], sums.data_ptr()
    for x, count in zip(dense, counts, strict=True):
        rows.append(_Tensor(x.data_ptr(), x.numel(), start, x.dtype == torch.bfloat16))
        start += count * sums.element_size()
    run = kernel("native_square_sum", None, POINTER, SIZE, INT, INT)
    run((_Tensor * len(rows))(*rows), len(rows), max(1, torch.get_num_threads()), load().level)
    return sums.sum().float()


_OP = register(
    "square_sum(Tensor[] tensors) -> Tensor",
    _compute,
    lambda tensors: tensors[0].new_empty((), dtype=torch.float32),
)
