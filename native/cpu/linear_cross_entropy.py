"""A model's last matrix and its cross-entropy on a CPU, without keeping the logits.

The forward pass also computes both products of the backward pass, for some tokens at a time: the gradient
is written over the logits, which are then freed. So at most about `PIECE` bytes of logits exist at a time,
and the padding columns of the vocabulary are not cut off in a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.compiled.library import load, why_not
from native.cpu.cross_entropy import checked, losses_of, mean_of
from native.reference import linear_cross_entropy as plain

__all__ = ["describe", "linear_cross_entropy", "why_not"]

# In bytes. Each additional piece costs one pass over the gradient of the matrix.
PIECE = 256 << 20
_TYPES = (torch.float32, torch.bfloat16)


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"no logits are kept, gradient in their place ({load().describe()})"


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of x weight^T; the reference computes other types than fp32 and bf16."""
    if torch.is_autocast_enabled("cpu"):
        x, weight = (each.to(torch.get_autocast_dtype("cpu")) for each in (x, weight))
    with torch.autocast("cpu", enabled=False):
        if x.dtype not in _TYPES or x.dtype != weight.dtype or x.device.type != "cpu":
            return plain(x, weight, targets, vocabulary, ignore_index)
        targets = checked(targets, vocabulary, ignore_index)
        if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
            return _loss(x.detach(), weight.detach(), targets, vocabulary, ignore_index)
        loss: Tensor = _AtOnce.apply(x, weight, targets, vocabulary, ignore_index)  # type: ignore[no-untyped-call]
        return loss


class _AtOnce(torch.autograd.Function):
    """The op for autograd: forward already computes the gradients; backward returns them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int
    ) -> Tensor:
        # The matrix of a model that learns adapters alone gets no gradient.
        dw = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        dx = torch.empty_like(x)
        ctx.gradients = dx, dw
        return _loss(x, weight, targets, vocabulary, ignore_index, dx, dw)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy are spent")
        dx, dw = ctx.gradients
        ctx.gradients = None
        if upstream.item() != 1.0:
            dx.mul_(upstream)
            if dw is not None:
                dw.mul_(upstream)
        return dx, dw, None, None, None


def _loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: int,
    ignore_index: int,
    dx: Tensor | None = None,
    dw: Tensor | None = None,
) -> Tensor:
    """Return the mean loss, and fill `dx` and `dw` with the gradients if they are given."""
    count = int((targets != ignore_index).sum())
    rows = max(1, min(len(x), PIECE // max(1, len(weight) * x.element_size())))
    # Several bf16 gradients are added in fp32.
    several = dw is not None and rows < len(x) and dw.dtype != torch.float32
    sum_dw = torch.zeros_like(dw, dtype=torch.float32) if several and dw is not None else dw
    losses = []
    for start in range(0, len(x), rows):
        own, logits = slice(start, start + rows), x[start : start + rows] @ weight.t()
        made = losses_of(logits, targets[own], ignore_index, dx is not None, load().level, vocabulary, count)
        losses.append(made)
        if dx is None:
            continue
        torch.mm(logits, weight, out=dx[own])
        if sum_dw is None:
            continue
        if several:
            sum_dw.add_(logits.t() @ x[own])
        elif start == 0:
            torch.mm(logits.t(), x[own], out=sum_dw)
        else:
            sum_dw.addmm_(logits.t(), x[own])
        del logits
    if several and dw is not None and sum_dw is not None:
        dw.copy_(sum_dw)
    return mean_of(torch.cat(losses), count)
