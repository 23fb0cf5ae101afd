"""Bias, dropout and residual on a CPU, with one pass in each direction; the mask is recomputed and never stored."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native import reference
from native.compiled.arguments import FLOAT, INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import address, computes, kernel, register
from native.gradients import dropout_add_op
from native.masks import threshold_of

# The rows are divided into this many pieces; each has its own sum of the bias's gradient.
PIECES = 32


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in dropout.cpp."""

    _fields_ = structure(
        (POINTER, "x residual bias out sums"),
        (SIZE, "rows width piece"),
        (ctypes.c_uint64, "seed offset"),
        (ctypes.c_uint32, "threshold"),
        (FLOAT, "scale"),
        (INT, "threads level"),
    )


METHOD = "the mask from a counter, never stored"


def dropout_add(
    x: Tensor, residual: Tensor, bias: Tensor | None, state: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias); the reference computes tensors of different types or shapes."""
    if not computes("dropout_add", x, residual):
        return reference.dropout_add(x, residual, bias, state, probability)
    result: Tensor = _FORWARD(x, residual, None if bias is None else bias.float(), state, probability)
    return result


def _forward(x: Tensor, residual: Tensor, bias: Tensor | None, state: Tensor, probability: float) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    return _run(x.contiguous(), residual.contiguous(), bias, None, state, probability)


def _backward(upstream: Tensor, state: Tensor, probability: float, biased: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x`, and in fp32 that of the bias."""
    sums = upstream.new_zeros(PIECES, upstream.shape[-1], dtype=torch.float32) if biased else None
    own = _run(upstream.contiguous(), None, None, sums, state, probability)
    return own, upstream.new_empty(0, dtype=torch.float32) if sums is None else sums.sum(0)


def _run(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    sums: Tensor | None,
    state: Tensor,
    probability: float,
) -> Tensor:
    out = torch.empty_like(x)
    if not x.numel():
        return out
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    arguments = _Arguments(
        *map(address, (x, residual, bias, out, sums)),
        rows,
        width,
        -(-rows // PIECES),
        *state.tolist(),
        threshold_of(probability, 16),
        1.0 / (1.0 - probability),
        torch.get_num_threads(),
        load().level,
    )
    kernel("native_dropout", x.dtype, POINTER)(ctypes.byref(arguments))
    return out


_FORWARD = dropout_add_op(register, _forward, _backward)
