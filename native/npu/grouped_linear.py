"""Products of groups of rows, each with its own matrix, on Ascend NPUs: one call of CANN's npu_grouped_matmul."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.npu import library
from native.reference import grouped_linear as plain

# The dimension that the kernel divides into groups: the rows of the first operand, or the inner dimension.
ROWS, INNER = 0, 2
# The value of `split_item` for one result of all groups.
ONE_RESULT = 3

NEEDS = ("npu_grouped_matmul",)
METHOD = "CANN's npu_grouped_matmul"


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of each group times the transpose of its matrix."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x, weight = (each.to(torch.get_autocast_dtype(device)) for each in (x, weight))
    if x.dtype != weight.dtype or not library.computes("grouped_linear", x, "npu_grouped_matmul"):
        return plain(x, weight, counts)
    result: Tensor = _GroupedLinear.apply(x, weight, counts.cumsum(0))  # type: ignore[no-untyped-call]
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight.transpose(1, 2), ends, ROWS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        own = _product(upstream, weight, ends, ROWS) if of_x else None
        return own, _product(upstream.t(), x, ends, INNER) if of_weight else None, None


def _product(first: Tensor, second: Tensor, ends: Tensor, divided: int) -> Tensor:
    """Return the products of the groups that end at `ends`."""
    kernel = library.kernel("npu_grouped_matmul")
    made: list[Tensor] = kernel(
        [first], [second], group_list=ends, split_item=ONE_RESULT, group_type=divided, group_list_type=0
    )
    return made[0]
