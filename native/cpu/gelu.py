"""GELU on a CPU, exact or by tanh, with one pass in each direction that also adds a bias and sums its gradient."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native import reference
from native.compiled.arguments import INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import address, computes, kernel, register
from native.gradients import gelu_ops

# The rows are divided into this many pieces; each has a separate sum of the bias's gradient.
PIECES = 32
# The length of a row if there is no bias.
ROW = 4096


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in gelu.cpp."""

    _fields_ = structure(
        (POINTER, "x above bias out sums"), (SIZE, "rows width piece"), (INT, "tanh threads level")
    )


METHOD = "one pass each way"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`; the reference computes other types than fp32 and bf16."""
    if not computes("gelu", x):
        return reference.gelu(x, approximate)
    result: Tensor = _FORWARD(x, None, approximate == "tanh")
    return result


def gelu_backward(x: Tensor, upstream: Tensor, approximate: str = "none") -> Tensor:
    """Return the gradient of `x` from that of `gelu`."""
    if not computes("gelu", x):
        return reference.gelu_backward(x, upstream, approximate)
    result: Tensor = _BACKWARD(upstream, x, None, approximate == "tanh")[0]
    return result


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of x + bias; the reference computes other types than fp32 and bf16."""
    if not computes("bias_gelu", x):
        return reference.bias_gelu(x, bias, approximate)
    result: Tensor = _FORWARD(x, bias.float(), approximate == "tanh")
    return result


def _forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return _run(x.contiguous(), bias, None, None, tanh)


def _backward(upstream: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x`, and in fp32 that of the bias."""
    sums = None if bias is None else x.new_zeros(PIECES, x.shape[-1], dtype=torch.float32)
    own = _run(x.contiguous(), bias, upstream.contiguous(), sums, tanh)
    return own, x.new_empty(0, dtype=torch.float32) if sums is None else sums.sum(0)


def _run(x: Tensor, bias: Tensor | None, above: Tensor | None, sums: Tensor | None, tanh: bool) -> Tensor:
    out, count = torch.empty_like(x), x.numel()
    if not count:
        return out
    bias = None if bias is None else bias.contiguous()
    addresses = [address(each) for each in (x, above, bias, out, sums)]
    run = kernel("native_gelu", x.dtype, POINTER)
    rest = (tanh, torch.get_num_threads(), load().level)
    if bias is not None:
        rows, width = count // x.shape[-1], x.shape[-1]
        run(ctypes.byref(_Arguments(*addresses, rows, width, -(-rows // PIECES), *rest)))
        return out
    rows = count // ROW
    run(ctypes.byref(_Arguments(*addresses, rows, ROW, 1, *rest)))
    if count % ROW:
        done = rows * ROW * x.element_size()
        addresses = [None if each is None else each + done for each in addresses]
        run(ctypes.byref(_Arguments(*addresses, 1, count % ROW, 1, *rest)))
    return out


_FORWARD, _BACKWARD = gelu_ops(register, _forward, _backward)
