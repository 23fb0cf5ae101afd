"""A model's last matrix and its cross-entropy on CUDA, for some tokens at a time, without storing all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from native.chunked import TokenLoss
from native.cuda import language
from native.cuda.cross_entropy import TYPES, count_of, losses_of, mean_of, scale_
from native.cuda.language import register
from native.cuda.language import why_not as why_not
from native.fallback import report_fallback
from native.gradients import linear_cross_entropy_op
from native.reference import linear_cross_entropy as plain


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return language.describe("logits are overwritten with their gradient")


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
        # If a model only trains adapters, this matrix has no gradient.
        of_weight = torch.is_grad_enabled() and weight.requires_grad
        of_x = of_weight or (torch.is_grad_enabled() and x.requires_grad)
        loss: Tensor = _OP(x, weight, targets, vocabulary, ignore_index, of_x, of_weight)[0]
        return loss


def _loss_of(targets: Tensor, vocabulary: int, ignore_index: int) -> tuple[Tensor, TokenLoss]:
    count = count_of(targets, ignore_index)

    def losses(logits: Tensor, own: Tensor, gradient: bool) -> Tensor:
        return losses_of(logits, own, ignore_index, count, vocabulary, gradient)

    return targets, TokenLoss(losses, lambda each: mean_of(each, count), scale_)


_OP = linear_cross_entropy_op(register, _loss_of, scale_)
