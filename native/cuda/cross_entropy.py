"""Cross-entropy on CUDA: loss and gradient in one launch, with the gradient written over the logits.

There is no synchronization with the device: the number of counted tokens stays on it, and a target outside the
vocabulary makes the loss NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, register, tl
from native.gradients import cross_entropy_op
from native.reference import cross_entropy as plain

METHOD = "gradient in place of the logits"


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy.

    Logits that need a gradient are overwritten with it, unless they are a leaf or torch.compile traces the call.
    """
    if not language.computes("cross_entropy", logits):
        return plain(logits, targets, ignore_index)
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        shapes = f"{tuple(logits.shape)} and {tuple(targets.shape)}"
        raise ValueError(
            f"cross_entropy takes logits (tokens, vocabulary) and targets (tokens,), not {shapes}"
        )
    if torch.compiler.is_compiling():
        if needs_scale(logits):
            return plain(logits, targets, ignore_index)
        found: Tensor = _APART(logits, targets, ignore_index)[0]
        return found
    count = count_of(targets, ignore_index)
    if not (logits.requires_grad and torch.is_grad_enabled()):
        losses = losses_of(logits.detach().contiguous(), targets, ignore_index, count, logits.shape[1])
        return mean_of(losses, count)
    own = logits.clone() if logits.is_leaf else logits
    loss: Tensor = _InPlace.apply(own, targets, count, ignore_index)  # type: ignore[no-untyped-call]
    return loss


@jit
def _cross_entropy(
    logits_at: tl.tensor, targets_at: tl.tensor, count_at: tl.tensor, losses_at: tl.tensor,
    stride: tl.tensor, columns: tl.tensor, vocabulary: tl.tensor, ignore_index: tl.tensor,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * stride
    lane = tl.arange(0, BLOCK)
    target = tl.load(targets_at + row)
    counted = target != ignore_index
    valid = (target >= 0) & (target < vocabulary)
    # Read it before any thread overwrites it.
    own = tl.load(logits_at + target, valid, float("nan")).to(tl.float32)
    tl.debug_barrier()
    # The largest logit so far, and for each lane the sum of the exponentials of the distances to it.
    top = -float("inf")
    totals = tl.zeros([BLOCK], tl.float32)
    # An ignored token's logits are not read.
    end = tl.where(counted, vocabulary, 0)
    for start in range(0, end, BLOCK):
        inside = start + lane < end
        x = tl.load(logits_at + start + lane, inside, -float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        # Without a finite logit the distance would be infinity minus infinity.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        totals = totals * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    total = tl.sum(totals, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    tl.store(losses_at + row, tl.where(counted, tl.log(total) - (own - base), 0.0))
    if GRADIENT:
        share = 1.0 / tl.load(count_at).to(tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            read = column < end
            x = tl.load(logits_at + column, read, -float("inf")).to(tl.float32)
            slope = (tl.exp(x - base) / total - tl.where(column == target, 1.0, 0.0)) * share
            slope = tl.where(read, slope, 0.0)
            tl.store(logits_at + column, slope.to(logits_at.dtype.element_ty), column < columns)


@jit
def _scale(
    x_at: tl.tensor, factor_at: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    factor = tl.load(factor_at).to(tl.float32)
    # Without gradient accumulation the factor is 1, and nothing is read or written.
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, at < count, 0.0).to(tl.float32) * factor
        tl.store(x_at + at, x.to(x_at.dtype.element_ty), at < count)


def needs_scale(x: Tensor) -> bool:
    """Return whether a gradient of this type waits for the backward pass, which knows the loss scale.

    Without the scale, a gradient over a million tokens is below the smallest number of fp16.
    """
    return x.dtype == torch.float16


class _InPlace(torch.autograd.Function):
    """Cross-entropy whose forward pass already computes the gradient, except in fp16; backward returns it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, count: Tensor, ignore_index: int) -> Tensor:
        gradient = logits.contiguous()
        given = targets, ignore_index, count, logits.shape[1]
        losses = losses_of(gradient, *given, gradient=not needs_scale(logits))
        # Autograd then raises an error if another op saved the logits, which are overwritten here.
        torch.autograd.graph.increment_version(logits)
        ctx.gradient, ctx.given = gradient, given
        return mean_of(losses, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the gradient of cross_entropy overwrote the logits and was already used")
        if needs_scale(gradient):
            targets, ignore_index, count, vocabulary = ctx.given
            losses_of(gradient, targets, ignore_index, count / upstream, vocabulary, gradient=True)
        else:
            scale_(gradient, upstream)
        return gradient, None, None, None


def count_of(targets: Tensor, ignore_index: int) -> Tensor:
    """Return how many tokens are in the mean, as a tensor on the device."""
    return (targets != ignore_index).sum()


def mean_of(losses: Tensor, count: Tensor) -> Tensor:
    """Return the sum of the losses over `count` in fp32, summed in fp64; NaN if `count` is 0."""
    return (losses.sum(dtype=torch.float64) / count).float()


def losses_of(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    count: Tensor,
    vocabulary: int,
    gradient: bool = False,
) -> Tensor:
    """Return the loss of each token; `gradient`: overwrite the logits with the gradient of their sum over `count`.

    Columns from `vocabulary` on are padding and have no gradient.
    """
    tokens, columns = logits.shape
    losses, blocks = torch.empty(tokens, dtype=torch.float32, device=logits.device), blocks_for(logits)
    size = min(blocks.columns, language.width_of(columns))
    if tokens:
        with on_device(logits):
            _cross_entropy[(tokens,)](
                logits,
                targets.to(torch.int64).contiguous(),
                count,
                losses,
                logits.stride(0),
                columns,
                vocabulary,
                ignore_index,
                GRADIENT=gradient,
                BLOCK=size,
                num_warps=blocks.warps(size),
            )
    return losses


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous `x` in place by a scalar on the device; for a factor of 1 nothing is read."""
    blocks = blocks_for(x)
    if x.numel():
        with on_device(x):
            _scale[(-(-x.numel() // blocks.flat),)](x, factor, x.numel(), BLOCK=blocks.flat)


def _apart(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient in new memory."""
    gradient, count = logits.clone(memory_format=torch.contiguous_format), count_of(targets, ignore_index)
    losses = losses_of(gradient, targets, ignore_index, count, logits.shape[1], gradient=True)
    return mean_of(losses, count), gradient


_APART = cross_entropy_op(register, _apart)
