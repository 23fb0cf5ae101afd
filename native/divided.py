"""Cross-entropy of logits whose columns are divided among ranks, with one exchange; each backend has two kernels.

The first kernel reads the local logits once and computes three numbers per token, which the ranks exchange. The second
writes the gradient over the logits. So no other tensor as large as the logits is stored, and no fp32 copy of bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.vocabulary import VocabularyPart

# These replace a column if the target belongs to another rank, or if the token is not counted.
ELSEWHERE, IGNORED = -1, -2


@dataclass(frozen=True)
class ColumnKernels:
    """The kernels of a backend; `columns` has each token's target among these columns, or one of the numbers above."""

    sums: Callable[[Tensor, Tensor, int, float, float], Tensor]
    """Takes logits, columns, how many are no padding, the weights of the target's logit and of every logit.

    Returns (3, tokens): the largest logit, the sum of exp(logit - largest), and the weighted sum of the logits.
    """
    slopes_: Callable[[Tensor, Tensor, Tensor, int, float, float], None]
    """Writes the gradient over the logits: exp(logit - top) x factor - share x (both weights), 0 where ignored.

    Takes logits, columns, (3, tokens) of top, factor and share, and the last three arguments of `sums`.
    """
    scale_: Callable[[Tensor, Tensor], None]
    """Multiplies a tensor by a scalar tensor in place."""


def divided_loss(
    logits: Tensor,
    targets: Tensor,
    part: VocabularyPart,
    smoothing: float,
    ignore_index: int,
    kernels: ColumnKernels,
) -> Tensor:
    """Return the mean loss; logits that need a gradient are overwritten with it, unless they are a leaf."""
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        shapes = f"{tuple(logits.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"vocabulary_cross_entropy takes logits (tokens, columns) and targets, not {shapes}")
    columns = _columns_of(targets, part, ignore_index)
    weights = (1.0 - smoothing, smoothing / part.vocabulary)
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return _loss(logits.detach(), columns, part, weights, kernels)[0]
    own = logits.clone() if logits.is_leaf else logits
    loss: Tensor = _InPlace.apply(own, columns, part, weights, kernels)  # type: ignore[no-untyped-call]
    return loss


def _columns_of(targets: Tensor, part: VocabularyPart, ignore_index: int) -> Tensor:
    own = targets.to(torch.int64) - part.first
    own = own.masked_fill((own < 0) | (own >= part.own), ELSEWHERE)
    return own.masked_fill_(targets == ignore_index, IGNORED)


def _loss(
    logits: Tensor,
    columns: Tensor,
    part: VocabularyPart,
    weights: tuple[float, float],
    kernels: ColumnKernels,
) -> tuple[Tensor, Tensor]:
    """Return the mean loss, and of each token what `slopes_` takes, (3, tokens)."""
    numbers = kernels.sums(logits, columns, part.own, *weights)
    every = numbers.unsqueeze(0) if part.gather is None else part.gather(numbers)
    tops, sums, wanted = every.unbind(1)
    top = tops.amax(0)
    total = (sums * (tops - top).exp()).sum(0)
    # A rank whose columns are all padding contributes nothing.
    losses = total.log() + (top - wanted.sum(0))
    counted = columns != IGNORED
    count = counted.sum()
    share = (counted / count).to(total.dtype)
    return torch.where(counted, losses, 0.0).sum() / count, torch.stack((top, share / total, share))


class _InPlace(torch.autograd.Function):
    """The forward pass already computes the gradient; backward returns it.

    In fp16 the backward pass computes it, with the loss scale: else most of its numbers are below fp16's smallest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        part: VocabularyPart,
        weights: tuple[float, float],
        kernels: ColumnKernels,
    ) -> Tensor:
        gradient = logits if logits.stride(-1) == 1 else logits.contiguous()
        loss, factors = _loss(gradient, columns, part, weights, kernels)
        run = partial(kernels.slopes_, gradient, columns, factors, part.own, *weights)
        if logits.dtype == torch.float16:
            ctx.run = lambda upstream: (factors[1:].mul_(upstream), run())
        else:
            run()
            ctx.run = partial(kernels.scale_, gradient)
        # Autograd then raises an error if another op saved the logits, which are overwritten here.
        torch.autograd.graph.increment_version(logits)
        ctx.gradient = gradient
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError(
                "the gradient of vocabulary_cross_entropy overwrote the logits and was already used"
            )
        ctx.run(upstream)
        ctx.run = None
        return gradient, None, None, None, None
