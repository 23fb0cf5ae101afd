"""A model's last matrix and its cross-entropy on CUDA, for some tokens at a time, without storing all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.chunked import TokenLoss, loss_in_pieces
from native.cuda import language
from native.cuda.cross_entropy import count_of, losses_of, mean_of, needs_scale, scale_
from native.cuda.language import register
from native.fallback import report_fallback
from native.gradients import linear_cross_entropy_op
from native.reference import linear_cross_entropy as plain

METHOD = "logits are overwritten with their gradient"


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of x weight^T."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x, weight = (each.to(torch.get_autocast_dtype(device)) for each in (x, weight))
    loss: Tensor
    with torch.autocast(device, enabled=False):
        if x.dtype != weight.dtype:
            reason = f"needs input and matrix of one type, not {x.dtype} and {weight.dtype}"
            report_fallback("linear_cross_entropy", "cuda", reason)
            return plain(x, weight, targets, vocabulary, ignore_index)
        if not language.computes("linear_cross_entropy", x):
            return plain(x, weight, targets, vocabulary, ignore_index)
        # If a model only trains adapters, this matrix has no gradient.
        of_weight = torch.is_grad_enabled() and weight.requires_grad
        of_x = of_weight or (torch.is_grad_enabled() and x.requires_grad)
        if of_x and needs_scale(x):
            loss = _Scaled.apply(x, weight, targets, vocabulary, ignore_index)  # type: ignore[no-untyped-call]
            return loss
        loss = _OP(x, weight, targets, vocabulary, ignore_index, of_x, of_weight)[0]
        return loss


class _Scaled(torch.autograd.Function):
    """The op in fp16: the backward pass computes the logits again, and then their gradient with the loss scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.numbers = vocabulary, ignore_index
        return loss_in_pieces(x, weight, *_loss_of(targets, vocabulary, ignore_index))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        vocabulary, ignore_index = ctx.numbers
        dx, dw = torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        loss_in_pieces(x, weight, *_loss_of(targets, vocabulary, ignore_index, upstream), dx, dw)
        return dx, dw, None, None, None


def _loss_of(
    targets: Tensor, vocabulary: int, ignore_index: int, upstream: Tensor | None = None
) -> tuple[Tensor, TokenLoss]:
    """Return the targets and their loss, whose gradient is multiplied by `upstream`."""
    count = count_of(targets, ignore_index)
    divisor = count if upstream is None else count / upstream

    def losses(logits: Tensor, own: Tensor, gradient: bool) -> Tensor:
        return losses_of(logits, own, ignore_index, divisor, vocabulary, gradient)

    return targets, TokenLoss(losses, lambda each: mean_of(each, count), scale_)


_OP = linear_cross_entropy_op(register, _loss_of, scale_)
