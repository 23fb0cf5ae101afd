"""A model's last matrix and its cross-entropy, without keeping the logits; each backend brings its own cross-entropy.

The forward pass also computes both products of the backward pass, for some tokens at a time: the gradient
is written over the logits, which are then freed. So at most about `PIECE` bytes of logits exist at a time,
and the padding columns of the vocabulary are not cut off in a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# In bytes. Each additional piece costs one pass over the gradient of the matrix.
PIECE = 256 << 20


@dataclass(frozen=True)
class TokenLoss:
    """The cross-entropy of a backend, for some of the tokens at a time."""

    losses: Callable[[Tensor, Tensor, bool], Tensor]
    """Takes contiguous logits, their targets, and whether to overwrite the logits with the gradient of the mean."""
    mean: Callable[[Tensor], Tensor]
    """Takes the losses of all tokens."""
    scale_: Callable[[Tensor, Tensor], None]
    """Multiplies a tensor by a scalar tensor in place."""


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, own: TokenLoss) -> Tensor:
    """Return the mean cross-entropy of x weight^T; forward already computes the gradients that are needed."""
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return loss_in_pieces(x.detach(), weight.detach(), targets, own)
    loss: Tensor = _AtOnce.apply(x, weight, targets, own)  # type: ignore[no-untyped-call]
    return loss


class _AtOnce(torch.autograd.Function):
    """The op for autograd: forward already computes the gradients; backward returns them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, own: TokenLoss) -> Tensor:
        # The matrix of a model that learns adapters alone gets no gradient.
        dw = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        dx = torch.empty_like(x)
        ctx.gradients, ctx.scale_ = (dx, dw), own.scale_
        return loss_in_pieces(x, weight, targets, own, dx, dw)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy are spent")
        dx, dw = ctx.gradients
        ctx.gradients = None
        for gradient in (dx, dw):
            if gradient is not None:
                ctx.scale_(gradient, upstream)
        return dx, dw, None, None


def loss_in_pieces(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    own: TokenLoss,
    dx: Tensor | None = None,
    dw: Tensor | None = None,
) -> Tensor:
    """Return the mean loss, and fill `dx` and `dw` with the gradients if they are given."""
    rows = max(1, min(len(x), PIECE // max(1, len(weight) * x.element_size())))
    # Several bf16 gradients are added in fp32.
    several = dw is not None and rows < len(x) and dw.dtype != torch.float32
    sum_dw = torch.zeros_like(dw, dtype=torch.float32) if several and dw is not None else dw
    losses = []
    for start in range(0, len(x), rows):
        piece, logits = slice(start, start + rows), x[start : start + rows] @ weight.t()
        losses.append(own.losses(logits, targets[piece], dx is not None))
        if dx is None:
            continue
        torch.mm(logits, weight, out=dx[piece])
        if sum_dw is None:
            continue
        if several:
            sum_dw.add_(logits.t() @ x[piece])
        elif start == 0:
            torch.mm(logits.t(), x[piece], out=sum_dw)
        else:
            sum_dw.addmm_(logits.t(), x[piece])
        del logits
    if several and dw is not None and sum_dw is not None:
        dw.copy_(sum_dw)
    if not losses and dw is not None:
        dw.zero_()
    return own.mean(torch.cat(losses) if losses else x.new_empty(0, dtype=torch.float32))
