"""What the custom ops of the CPU and of CUDA share: the shapes of their results, and what they keep for gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# ---- rotary


def rotated_shapes(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors, in memory (batch, rows, heads, dim)."""
    first, second = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k))
    return first, second


def keep_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the angles and the direction of a rotation, which its gradient turns back."""
    _, _, cosines, sines, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cosines, sines)


# ---- cross_entropy


def loss_and_gradient_shapes(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return an empty loss and an empty gradient of the logits."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.new_empty((), dtype=torch.float32), gradient


def keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the gradient that was computed with the loss."""
    _, gradient = output
    ctx.mark_non_differentiable(gradient)
    ctx.save_for_backward(gradient)


def scaled_gradient(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    """Return the kept gradient multiplied by the factor of the loss."""
    (gradient,) = ctx.saved_tensors
    return (gradient * upstream).to(gradient.dtype), None, None


# ---- dropout_add


def same_shape(x: Tensor, *_: Any) -> Tensor:
    """Return an empty contiguous tensor like `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dropout_gradient_shapes(
    upstream: Tensor, state: Tensor, probability: float, biased: bool
) -> tuple[Tensor, Tensor]:
    """Return an empty gradient of the input and one of the bias, which has no numbers without a bias."""
    width = upstream.shape[-1] if biased else 0
    return same_shape(upstream), upstream.new_empty(width, dtype=torch.float32)


# ---- linear_cross_entropy


def linear_loss_shapes(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: int,
    ignore_index: int,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an empty loss and empty gradients of `x` and `weight`, which have no numbers if nobody needs them."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else x.new_empty(0)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else x.new_empty(0)
    return x.new_empty((), dtype=torch.float32), dx, dw


def keep_both_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keep the gradients that were computed with the loss, and which of them are needed."""
    _, dx, dw = output
    ctx.mark_non_differentiable(dx, dw)
    ctx.save_for_backward(dx, dw)
    ctx.has = inputs[-2:]
