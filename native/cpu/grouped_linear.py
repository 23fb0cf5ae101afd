"""Products of groups of rows, each with its own matrix, on a CPU: the products of `linear` write into one result.

Groups are so large that one call per group costs nothing. This code saves time in the gradient of the matrices: for
each group, autograd's gradient of a slice would be a tensor of zeros as large as all matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native import products
from native.compiled.op import register
from native.gradients import grouped_linear_op


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "the products of linear, with the gradient of all matrices in one tensor"


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of each group times the transpose of its matrix."""
    if torch.is_autocast_enabled("cpu"):
        x, weight = (each.to(torch.get_autocast_dtype("cpu")) for each in (x, weight))
    if x.dtype != weight.dtype or weight.dim() != 3 or x.shape[1:] != weight.shape[2:]:
        shapes = f"{tuple(x.shape)} in {x.dtype} and {tuple(weight.shape)} in {weight.dtype}"
        raise ValueError(f"grouped_linear takes rows and matrices (groups, outputs, inputs), not {shapes}")
    result: Tensor = _FORWARD(x, weight, counts)
    return result


def _forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return _products(x, weight.transpose(1, 2), counts)


def _products(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of each group times its matrix (inputs, outputs)."""
    out = x.new_empty(len(x), matrices.shape[2])
    sizes = counts.tolist()
    if len(sizes) != len(matrices) or sum(sizes) != len(x):
        raise ValueError(f"grouped_linear takes {len(x)} rows in {len(matrices)} groups, not {sizes}")
    for rows, own, matrix in zip(x.split(sizes), out.split(sizes), matrices, strict=True):
        products.mm(rows, matrix, own)
    return out


def _backward(
    upstream: Tensor, x: Tensor, weight: Tensor, counts: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    upstream = upstream.contiguous()
    first = _products(upstream, weight, counts) if of_x else x.new_empty(0)
    second = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else x.new_empty(0)
    if of_weight:
        sizes = counts.tolist()
        for slopes, rows, own in zip(upstream.split(sizes), x.split(sizes), second, strict=True):
            products.mm(slopes.t(), rows, own)
    return first, second


_FORWARD = grouped_linear_op(register, _forward, _backward)
