"""Products of matrices by torch, except bf16 products on a CPU without bf16 instructions.

On such a CPU torch uses a plain loop, at a tenth to a hundredth of the rate of fp32 products. Here blocks of both
matrices are converted to fp32 and multiplied in fp32, and the sums are rounded to bf16 once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# The rows and columns of a block. Multiplying blocks takes far longer than converting them; a block has 16 MB.
SIDE = 2048


@functools.cache
def multiplies_bf16() -> bool:
    """Return whether torch has fast bf16 products for this CPU."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        # A torch without oneDNN cannot be asked.
        return True


def widens(x: Tensor) -> bool:
    """Return whether products of `x` are computed in blocks of fp32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bf16()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, with gradients."""
    if x.device.type != "cpu" or multiplies_bf16():
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype != torch.bfloat16 or weight.dtype != x.dtype:
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of two matrices, in `out` if it is given; without gradient."""
    if not widens(a):
        return torch.mm(a, b, out=out)
    out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    return _fill(out, a, b, None)


def addmm_(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Add `alpha` times the product of two matrices to `out`; return it. Without gradient."""
    return out.add_(mm(a, b), alpha=alpha) if widens(a) else out.addmm_(a, b, alpha=alpha)


def add_product_(total: Tensor, a: Tensor, b: Tensor, add_: Callable[[Tensor, Tensor], object]) -> None:
    """Add the product of two bf16 or fp16 matrices to an fp32 tensor, for some rows at a time. Without gradient.

    `add_` adds a tensor of the matrices' type to an fp32 tensor.
    """
    if widens(a):
        for rows in _parts(len(a)):
            for part in _parts(len(b)):
                total[rows].addmm_(_wide(a[rows, part]), _wide(b[part]))
        return
    # All parts share a buffer: new ones for each part would be spread over more memory.
    product = a.new_empty(min(SIDE, len(a)), b.shape[1])
    for rows in _parts(len(a)):
        piece = product[: rows.stop - rows.start]
        torch.mm(a[rows], b, out=piece)
        add_(total[rows], piece)


def _fill(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    inner = list(_parts(a.shape[1])) or [slice(0, 0)]
    for rows in _parts(a.shape[0]):
        for columns in _parts(b.shape[1]):
            products = ((_wide(a[rows, part]), _wide(b[part, columns])) for part in inner)
            first = next(products)
            total = torch.mm(*first) if bias is None else torch.addmm(bias[columns].float(), *first)
            for pair in products:
                total.addmm_(*pair)
            out[rows, columns] = total
    return out


def _parts(size: int) -> Iterator[slice]:
    """Return a dimension's blocks, which have similar sizes."""
    count = -(-size // SIDE)
    for number in range(count):
        yield slice(size * number // count, size * (number + 1) // count)


def _wide(x: Tensor) -> Tensor:
    """Return a block in fp32; the dimension that is contiguous stays contiguous."""
    return x.t().float().t() if x.stride(0) == 1 else x.float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.flatten(0, -2)
        out = x.new_empty(len(rows), len(weight))
        return _fill(out, rows, weight.t(), bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = upstream.flatten(0, -2)
        return (
            mm(rows, weight).view(x.shape) if of_x else None,
            mm(rows.t(), x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
