"""A model's last matrix and its cross-entropy on CUDA, some tokens at a time, without keeping the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native.chunked import TokenLoss, loss_in_pieces
from native.cuda import language
from native.cuda.cross_entropy import TYPES, count_of, losses_of, mean_of, scale_
from native.cuda.language import register
from native.cuda.language import why_not as why_not
from native.fallback import report_fallback
from native.gradients import keep_both_gradients, linear_loss_shapes
from native.reference import linear_cross_entropy as plain


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return language.describe("no logits are kept, gradient in their place")


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of x weight^T."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x, weight = (each.to(torch.get_autocast_dtype(device)) for each in (x, weight))
    with torch.autocast(device, enabled=False):
        if x.dtype != weight.dtype:
            reason = f"needs input and matrix of one type, not {x.dtype} and {weight.dtype}"
            report_fallback("linear_cross_entropy", "cuda", reason)
            return plain(x, weight, targets, vocabulary, ignore_index)
        if not language.computes("linear_cross_entropy", x, types=TYPES):
            return plain(x, weight, targets, vocabulary, ignore_index)
        # The matrix of a model that learns adapters alone gets no gradient.
        of_weight = torch.is_grad_enabled() and weight.requires_grad
        of_x = of_weight or (torch.is_grad_enabled() and x.requires_grad)
        loss: Tensor = _OP(x, weight, targets, vocabulary, ignore_index, of_x, of_weight)[0]
        return loss


def _compute(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: int,
    ignore_index: int,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the gradients of `x` and `weight`, which are empty if nobody needs them."""
    count = count_of(targets, ignore_index)

    def losses(logits: Tensor, own: Tensor, gradient: bool) -> Tensor:
        return losses_of(logits, own, ignore_index, count, vocabulary, gradient)

    token_loss = TokenLoss(losses, lambda each: mean_of(each, count), scale_)
    _, dx, dw = linear_loss_shapes(x, weight, targets, vocabulary, ignore_index, of_x, of_weight)
    given = dx if of_x else None, dw if of_weight else None
    return loss_in_pieces(x, weight, targets, token_loss, *given), dx, dw


def _gradient(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradients = ctx.saved_tensors
    if type(upstream) is not Tensor:
        # torch.compile traces this: a saved tensor stays as it is.
        gradients = tuple((gradient * upstream).to(gradient.dtype) for gradient in gradients)
    else:
        for gradient in gradients:
            scale_(gradient, upstream)
    dx, dw = (gradient if has else None for gradient, has in zip(gradients, ctx.has, strict=True))
    return dx, dw, None, None, None, None, None


_OP = register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, int vocabulary, int ignore_index, bool of_x,"
    " bool of_weight) -> (Tensor, Tensor, Tensor)",
    _compute,
    linear_loss_shapes,
    keep_both_gradients,
    _gradient,
)
