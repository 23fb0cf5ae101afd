"""Blocks of the decoder. What is fused comes from `native`; the rest is torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from trainer.models import ModelConfig


class LayerNorm(nn.Module):
    """Layer norm through the chosen backend; its weights stay fp32 in every precision.

    torch's bf16 backward sums their gradients in bf16 and was seen to be off by 4.0 in 118.
    """

    def __init__(self, config: ModelConfig, ops: native.Choice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.hidden))
        self.eps = config.eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, config: ModelConfig, ops: native.Choice) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.ops = ops

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """`hidden`: (batch, 1, sequence, sequence), True where a token is not seen; by default only later ones."""
        batch, sequence, width = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )  # each (batch, heads, sequence, head width)
        if hidden is None:
            mixed = self.ops.attention(q, k, v, causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, ~hidden)
        mixed = mixed.transpose(1, 2).reshape(batch, sequence, width)
        return F.dropout(self.out(mixed), self.dropout, self.training)


class FeedForward(nn.Module):
    """hidden -> inner -> GELU -> hidden."""

    def __init__(self, config: ModelConfig, ops: native.Choice) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.inner)
        self.down = nn.Linear(config.inner, config.hidden)
        self.dropout = config.dropout
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        inner = self.ops.gelu(self.up(x), self.approximate)
        down: Tensor = self.down(inner)
        return F.dropout(down, self.dropout, self.training)


class Block(nn.Module):
    """Attention and feed-forward, each after its layer norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, ops: native.Choice) -> None:
        super().__init__()
        self.norm_1 = LayerNorm(config, ops)
        self.attention = Attention(config, ops)
        self.norm_2 = LayerNorm(config, ops)
        self.feed_forward = FeedForward(config, ops)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), hidden)
        x = x + self.feed_forward(self.norm_2(x))
        return x


@torch.no_grad()
def initialize(model: nn.Module, std: float, layers: int, generator: torch.Generator) -> None:
    """GPT-2's initial weights: normal(0, std); std / sqrt(2 x layers) for what writes into the residual."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            into_residual = name.endswith(("attention.out", "feed_forward.down"))
            scale = std / math.sqrt(2 * layers) if into_residual else std
            module.weight.normal_(0.0, scale, generator=generator)
            module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, std, generator=generator)
