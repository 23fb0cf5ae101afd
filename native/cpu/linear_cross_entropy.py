"""A model's last matrix and its cross-entropy on a CPU, for some tokens at a time, without storing all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from native.chunked import TokenLoss
from native.compiled.library import load
from native.compiled.op import SUFFIX, register
from native.cpu.add_wide import add_wide_
from native.cpu.cross_entropy import checked, losses_of, mean_of
from native.fallback import report_fallback
from native.gradients import linear_cross_entropy_op
from native.reference import linear_cross_entropy as plain

METHOD = "logits are overwritten with their gradient"


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of x weight^T; the reference computes other types than fp32 and bf16."""
    if torch.is_autocast_enabled("cpu"):
        x, weight = (each.to(torch.get_autocast_dtype("cpu")) for each in (x, weight))
    with torch.autocast("cpu", enabled=False):
        if x.dtype not in SUFFIX or x.dtype != weight.dtype or x.device.type != "cpu":
            report_fallback("linear_cross_entropy", "cpu", f"has no kernel for {x.dtype} and {weight.dtype}")
            return plain(x, weight, targets, vocabulary, ignore_index)
        # If a model only trains adapters, this matrix has no gradient.
        of_weight = torch.is_grad_enabled() and weight.requires_grad
        of_x = of_weight or (torch.is_grad_enabled() and x.requires_grad)
        loss: Tensor = _OP(x, weight, targets, vocabulary, ignore_index, of_x, of_weight)[0]
        return loss


def _loss_of(targets: Tensor, vocabulary: int, ignore_index: int) -> tuple[Tensor, TokenLoss]:
    targets = checked(targets, vocabulary, ignore_index)
    count = int((targets != ignore_index).sum())

    def losses(logits: Tensor, own: Tensor, gradient: bool) -> Tensor:
        return losses_of(logits, own, ignore_index, gradient, load().level, vocabulary, count)

    return targets, TokenLoss(losses, lambda each: mean_of(each, count), _scale, add_wide_)


def _scale(gradient: Tensor, upstream: Tensor) -> None:
    if upstream.item() != 1.0:
        gradient.mul_(upstream)


_OP = linear_cross_entropy_op(register, _loss_of, _scale)
