"""The feed-forward part of a block: hidden -> inner -> hidden."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from trainer.config.model import ModelConfig
from trainer.model.linear import ColumnLinear, RowLinear, Source
from trainer.parallel.tensor import Parallel

# Of the gate `clamped`.
LIMIT, SLOPE = 7.0, 1.702


class Activation:
    """GELU; or gate(first) x second of the halves of the input, where the gate is silu or GELU."""

    def __init__(self, config: ModelConfig, ops: native.Choice) -> None:
        self.gate, self.ops = config.gate if config.swiglu else "", ops
        kind = config.gate if config.swiglu else config.activation
        self.approximate = "tanh" if kind == "gelu_tanh" else "none"

    def __call__(self, inner: Tensor) -> Tensor:
        if self.gate == "silu":
            return self.ops.swiglu(inner)
        if self.gate == "clamped":
            first, second = inner.chunk(2, -1)
            first, second = first.clamp(max=LIMIT), second.clamp(-LIMIT, LIMIT)
            return first * torch.sigmoid(first * SLOPE) * (second + 1.0)
        if self.gate:
            first, second = inner.chunk(2, -1)
            return F.gelu(first, approximate=self.approximate) * second
        return self.ops.gelu(inner, self.approximate)

    def gradient(self, inner: Tensor, upstream: Tensor) -> Tensor:
        """Return the gradient of `inner` from that of the activation."""
        if self.gate == "silu":
            return self.ops.swiglu_backward(inner, upstream)
        if self.gate:
            with torch.enable_grad():
                given = inner.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self(given), given, upstream)
            return slope
        return self.ops.gelu_backward(inner, upstream, self.approximate)


class FeedForward(nn.Module):
    """Two matrices with an activation between them; `inner` is the width between them, by default the config's."""

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel, inner: int = 0) -> None:
        super().__init__()
        inner = inner or config.inner
        sections = (inner,) * (2 if config.swiglu else 1)
        bias = config.bias == "all" and not config.experts
        self.up = ColumnLinear(config.hidden, sections, parallel, bias)
        self.down = RowLinear(inner, config.hidden, parallel, bias)
        self.activation = Activation(config, ops)

    def forward(self, x: Tensor, source: Source | None = None) -> Tensor:
        """Return what is added to the residual stream, before dropout.

        `source`: how the backward pass computes `x` again.
        """
        inner = self.up(x) if source is None else self.up(x, source)
        graph = torch.is_grad_enabled()
        widened: Tensor = self.down(inner, self.activation) if graph else self.down(self.activation(inner))
        return widened
