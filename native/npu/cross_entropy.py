"""Cross-entropy on Ascend NPUs by CANN's npu_cross_entropy_loss.

The kernel returns loss and logarithms in the type of the logits, so these are passed in fp32. For the kernel a negative
ignore_index means none, and its mean supports no other one with a gradient. So ignored tokens get target 0 here, and
their losses are left out of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native.npu import library
from native.reference import cross_entropy as plain

# How many rows the kernel handles at a time.
MOST_ROWS = 200_000

NEEDS = ("npu_cross_entropy_loss",)
METHOD = "CANN's npu_cross_entropy_loss"


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy in fp32 over the targets that are not `ignore_index`."""
    if not library.computes("cross_entropy", logits, "npu_cross_entropy_loss"):
        return plain(logits, targets, ignore_index)
    counted = targets != ignore_index
    losses, _ = losses_of(logits.float(), targets, counted)
    return mean_of(losses, counted.sum())


def losses_of(logits: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's loss, 0 for tokens that are not counted, and the logarithms of all probabilities, in fp32."""
    kernel = library.kernel("npu_cross_entropy_loss")
    known, rows = torch.where(counted, targets, 0).to(torch.int64), logits.contiguous()
    if len(rows) <= MOST_ROWS:
        # The gradient of a split would copy that of the logits.
        losses, logarithms = kernel(rows, known, reduction="none")[:2]
    else:
        pieces = zip(rows.split(MOST_ROWS), known.split(MOST_ROWS), strict=True)
        made = [kernel(*piece, reduction="none")[:2] for piece in pieces]
        losses, logarithms = (torch.cat(parts) for parts in zip(*made, strict=True))
    return torch.where(counted, losses, 0.0), logarithms


def mean_of(losses: Tensor, count: Tensor) -> Tensor:
    """Return the sum of the fp32 losses over `count`; NaN if `count` is 0."""
    return losses.sum() / count
