"""Define every op in plain torch. `native.cases` compares every other backend with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim.adamw import adamw as functional_adamw

from native.update import AdamWStep

# Devices that have torch's fused AdamW.
FUSED_ON = ("cpu", "cuda")


def why_not() -> str:
    """Return an empty string: this backend runs wherever torch runs."""
    return ""


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "plain torch, on any device"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Return the layer norm, computed in fp32, in the type of `x`.

    torch's own bf16 backward sums the weight's gradient in bf16: a measured error of 4.0 in 118 over 1,024
    rows.
    """
    wide = None if bias is None else _wide(bias)
    return F.layer_norm(_wide(x), x.shape[-1:], _wide(weight), wide, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return `x` divided by the root of its mean square, times the weight; computed in fp32, in the type of `x`.

    It keeps `x` and one number per row for the backward pass; torch's own function keeps another copy of `x`.
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse * _wide(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normal, slope = _wide(x) * inverse, _wide(upstream)
        of_weight = (slope * normal).flatten(0, -2).sum(0).to(weight.dtype)
        slope = slope * _wide(weight)
        own = inverse * (slope - normal * (slope * normal).mean(-1, keepdim=True))
        return own.to(x.dtype), of_weight, None


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`, exact or by tanh."""
    return F.gelu(x, approximate=approximate)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) times up of the halves of `x`; only `x` is kept for the backward pass."""
    result: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        of_gate = torch.ops.aten.silu_backward(upstream * up, gate)
        return torch.cat((of_gate, upstream * F.silu(gate)), -1)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy in fp32 over the targets that are not `ignore_index`."""
    return F.cross_entropy(_wide(logits), targets, ignore_index=ignore_index)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the cross-entropy of x times the rows of `weight` before `vocabulary`; the logits are not copied."""
    return cross_entropy(F.linear(x, weight[:vocabulary]), targets, ignore_index)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Return the attention by two matrix products.

    On a CPU this is 2.2 times as fast at 256 tokens as torch's fused attention.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (batch, heads, queries, keys)
    if causal:
        scores = scores.masked_fill(future(q.shape[-2], k.shape[-2], q.device), float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def adamw(update: AdamWStep) -> None:
    """Run one step of torch's AdamW in the type of the masters, with its fused kernel if the device has one."""
    held = update.held
    wide = [gradient.to(tensor.dtype) for gradient, tensor in zip(update.gradients, held, strict=True)]
    if update.factor != 1.0:
        torch._foreach_mul_(wide, update.factor)
    for decay in dict.fromkeys(update.decays):
        chosen = [i for i, own in enumerate(update.decays) if own == decay]
        kernel = torch._fused_adamw_ if held[chosen[0]].device.type in FUSED_ON else functional_adamw
        weights, slopes, means, powers = (
            [tensors[i] for i in chosen] for tensors in (held, wide, update.averages, update.squares)
        )
        kernel(
            weights,
            slopes,
            means,
            powers,
            # The maxima of Amsgrad, which is off.
            [],
            [torch.tensor(float(update.step), device=held[i].device) for i in chosen],
            amsgrad=False,
            lr=update.rate,
            beta1=update.betas[0],
            beta2=update.betas[1],
            weight_decay=decay,
            eps=update.eps,
            maximize=False,
        )
    for tensor, low in zip(held, update.lowered, strict=True):
        if low is not None:
            low.copy_(tensor)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers, in fp32."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros(())


def future(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return True where a key comes after a query; the last query is at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)


def _wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or unchanged if it is fp64, which the cases use to avoid rounding."""
    return x if x.dtype == torch.float64 else x.float()
