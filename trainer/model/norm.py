"""Norms of the residual stream, and of each head's queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import native
from trainer.config.model import ModelConfig
from trainer.config.norm import NORMS
from trainer.model.cuts import Cut
from trainer.parallel.tensor import ALONE, Parallel


class Norm(nn.Module):
    """Root mean square norm by the chosen backend, and the base of other kinds; its weights are always fp32.

    torch's bf16 backward pass of layer norm sums their gradients in bf16; an error of 4.0 in 118 was measured.
    """

    wide = "weight", "bias"
    """The parameters that are fp32 in every precision."""
    begin = 1.0
    """The initial weights."""

    def __init__(
        self, config: ModelConfig, ops: native.Choice, width: int = 0, heads_of: Parallel = ALONE
    ) -> None:
        """`width`: the size of a head, for a root mean square norm; `heads_of`: the ranks that divide the heads."""
        super().__init__()
        # The norm of heads sees the whole sequence, and `enter` sums its gradient over the ranks.
        partial = not width
        self.cuts = {"weight": Cut(partial=partial), "bias": Cut(partial=partial)}
        self.weight = nn.Parameter(torch.full((width or config.hidden,), self.begin))
        has_bias = NORMS[config.norm].bias and not width
        self.bias = nn.Parameter(torch.zeros(config.hidden)) if has_bias else None
        self.eps, self.ops, self.heads_of = config.eps, ops, heads_of

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of `x`; with a residual stream, return x + residual and the norm of this sum."""
        weight = self.factors()
        if residual is not None and (x.dtype == residual.dtype or torch.is_inference_mode_enabled()):
            return self.after(x, residual, weight)
        # Keep the residual stream in fp32 under autocast.
        added = x if residual is None else x + residual
        normal = self.normal(added, weight)
        return normal if residual is None else (added, normal)

    def factors(self) -> Tensor:
        """Return the factor of each number of a row."""
        return self.heads_of.enter(self.weight)

    def normal(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of each row."""
        return self.ops.rms_norm(x, weight, self.eps)

    def after(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of two tensors of one type, and its norm."""
        return self.ops.add_rms_norm(x, residual, weight, self.eps)


class LayerNorm(Norm):
    """Layer norm: subtracts the mean too, and has a bias."""

    bias: nn.Parameter

    def normal(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.layer_norm(x, weight, self.bias, self.eps)

    def after(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.add_layer_norm(x, residual, weight, self.bias, self.eps)


class OffsetNorm(Norm):
    """Root mean square norm whose weight is stored as its difference from 1."""

    begin = 0.0

    def factors(self) -> Tensor:
        return 1.0 + super().factors()


class DividedNorm(Norm):
    """Root mean square norm over all heads together, which the ranks divide; so is its weight."""

    def __init__(self, config: ModelConfig, ops: native.Choice, width: int, parallel: Parallel) -> None:
        """`width`: that of this rank's heads."""
        super().__init__(config, ops, width)
        self.cuts, self.parallel = {"weight": Cut(0)}, parallel

    def normal(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return super().normal(x, weight)
        wide = x.float()
        squares = self.parallel.shared_sum(wide.square().sum(-1, keepdim=True))
        means = squares / (x.shape[-1] * self.parallel.size)
        return (wide * torch.rsqrt(means + self.eps) * weight).to(x.dtype)


LAYERS: dict[str, type[Norm]] = {"layer": LayerNorm, "rms": Norm, "rms_offset": OffsetNorm}
"""The layer of each kind of `trainer.config.norm`."""


def norm_of(config: ModelConfig, ops: native.Choice) -> Norm:
    """Return a norm of the residual stream."""
    return LAYERS[config.norm](config, ops)


def head_norm_of(config: ModelConfig, ops: native.Choice, heads: int, size: int, parallel: Parallel) -> Norm:
    """Return a norm of this rank's queries or keys: of each head, or of all heads of all ranks together."""
    if config.qk_norm_whole:
        return DividedNorm(config, ops, heads * size, parallel)
    kind = Norm if NORMS[config.norm].bias else LAYERS[config.norm]
    return kind(config, ops, size, parallel)
