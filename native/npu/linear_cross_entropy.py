"""A model's last matrix and its cross-entropy on Ascend NPUs, for some tokens at a time, without storing all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from native.chunked import TokenLoss, chunked_loss
from native.fallback import report_fallback
from native.npu.cross_entropy import NEEDS as NEEDS
from native.npu.cross_entropy import losses_of, mean_of
from native.reference import linear_cross_entropy as plain

# Not fp16, which would lose small gradients before the loss scale multiplies them.
TYPES = (torch.float32, torch.bfloat16)

METHOD = "no logits are stored; CANN's npu_cross_entropy_loss"


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of x weight^T."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x, weight = (each.to(torch.get_autocast_dtype(device)) for each in (x, weight))
    with torch.autocast(device, enabled=False):
        if x.dtype not in TYPES or x.dtype != weight.dtype:
            report_fallback("linear_cross_entropy", "npu", f"has no kernel for {x.dtype} and {weight.dtype}")
            return plain(x, weight, targets, vocabulary, ignore_index)
        count = (targets != ignore_index).sum()

        def losses(logits: Tensor, own: Tensor, gradient: bool) -> Tensor:
            return _losses(logits, own, ignore_index, vocabulary, count if gradient else None)

        return chunked_loss(x, weight, targets, TokenLoss(losses, lambda each: mean_of(each, count), _scale))


def _losses(
    logits: Tensor, targets: Tensor, ignore_index: int, vocabulary: int, count: Tensor | None
) -> Tensor:
    """Return the losses; `count`: overwrite the logits with the gradient of the mean over it."""
    counted = targets != ignore_index
    losses, slopes = losses_of(logits[:, :vocabulary].float(), targets, counted)
    if count is None:
        return losses
    known = torch.where(counted, targets, 0).to(torch.int64).unsqueeze(1)
    slopes = slopes.exp_().scatter_add_(1, known, torch.full_like(known, -1, dtype=torch.float32))
    logits[:, :vocabulary] = slopes.div_(count).masked_fill_(~counted.unsqueeze(1), 0.0)
    logits[:, vocabulary:] = 0
    return losses


def _scale(gradient: Tensor, upstream: Tensor) -> None:
    gradient.mul_(upstream)
