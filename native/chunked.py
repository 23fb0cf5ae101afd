"""A model's last matrix and its cross-entropy, without storing all logits; each backend has its own cross-entropy.

The forward pass also computes both products of the backward pass, for some tokens at a time: the gradient is written
over the logits, which are then freed. So only the logits of some tokens exist at a time, and the padding columns of the
vocabulary need not be cut off in a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native import products
from native.vocabulary import tokens_at_a_time


@dataclass(frozen=True)
class TokenLoss:
    """The cross-entropy of a backend, computed for some of the tokens at a time."""

    losses: Callable[[Tensor, Tensor, bool], Tensor]
    """Takes contiguous logits, their targets, and whether to overwrite the logits with the gradient of the mean."""
    mean: Callable[[Tensor], Tensor]
    """Takes the losses of all tokens."""
    scale_: Callable[[Tensor, Tensor], None]
    """Multiplies a tensor by a scalar tensor in place."""
    add_: Callable[[Tensor, Tensor], object] = Tensor.add_
    """Adds a tensor of the logits' type to an fp32 tensor."""


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, own: TokenLoss) -> Tensor:
    """Return the mean cross-entropy of x weight^T; the forward pass also computes the gradients."""
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return loss_in_pieces(x.detach(), weight.detach(), targets, own)
    loss: Tensor = _AtOnce.apply(x, weight, targets, own)  # type: ignore[no-untyped-call]
    return loss


class _AtOnce(torch.autograd.Function):
    """The op for autograd: forward also computes the gradients, and backward returns them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, own: TokenLoss) -> Tensor:
        # If a model only trains adapters, this matrix has no gradient.
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        dx = torch.empty_like(x)
        ctx.gradients, ctx.scale_ = (dx, dw), own.scale_
        return loss_in_pieces(x, weight, targets, own, dx, dw)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy were already used")
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
    """Return the mean loss; write the gradients into `dx` and `dw` if they are given."""
    rows = tokens_at_a_time(len(x), len(weight), x.shape[1], x.element_size(), _memory_of(x.device))
    # Several bf16 gradients are added in fp32.
    several = dw is not None and rows < len(x) and dw.dtype != torch.float32
    sum_dw = _wide(dw) if several and dw is not None else dw
    losses = []
    for start in range(0, len(x), rows):
        piece, logits = slice(start, start + rows), products.mm(x[start : start + rows], weight.t())
        losses.append(own.losses(logits, targets[piece], dx is not None))
        if dx is None:
            continue
        products.mm(logits, weight, dx[piece])
        if sum_dw is None:
            continue
        if several:
            products.add_product_(sum_dw, logits.t(), x[piece], own.add_, start == 0)
        elif start == 0:
            products.mm(logits.t(), x[piece], sum_dw)
        else:
            products.addmm_(sum_dw, logits.t(), x[piece])
        del logits
    if several and dw is not None and sum_dw is not None:
        _narrow_in_place(sum_dw, dw)
    if not losses and dw is not None:
        dw.zero_()
    return own.mean(torch.cat(losses) if losses else x.new_empty(0, dtype=torch.float32))


@functools.cache
def _memory_of(device: torch.device) -> int:
    """Return the memory of a device in bytes; 0 for a CPU."""
    return 0 if device.type == "cpu" else int(getattr(torch, device.type).mem_get_info(device)[1])


def _wide(dw: Tensor) -> Tensor:
    """Return an fp32 tensor without values, whose first half becomes the memory of `dw`."""
    total = torch.empty(dw.shape, dtype=torch.float32, device=dw.device)
    dw.set_(total.view(dw.dtype), 0, dw.shape, total.stride())  # type: ignore[call-overload]
    return total


def _narrow_in_place(total: Tensor, dw: Tensor) -> None:
    """Round an fp32 tensor to `dw`, which is the first half of its memory; free the other half."""
    wide, narrow = total.view(-1), dw.view(-1)
    # The first number overwrites itself; each further part is written into memory that has already been read.
    narrow[:1] = wide[:1].clone()
    done = 1
    while done < len(wide):
        end = min(2 * done, len(wide))
        narrow[done:end] = wide[done:end]
        done = end
    # `dw.untyped_storage()` would make a second owner of this memory, so autograd could not add to `dw` in place.
    torch.ops.inductor.resize_storage_bytes_(dw, dw.nbytes)
