"""What both models are built of. What is fused comes from `native`; what crosses ranks from `parallel`.

A rank's part of a layer has some of its heads and some of its inner width; with one rank, all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from trainer.logical import Cut
from trainer.models import ModelConfig
from trainer.parallel import ALONE, Parallel, cross_entropy
from trainer.recompute import NOTHING, Recompute

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Sight:
    """What the blocks of one pass share: what sees what, and where each token stands."""

    hidden: Tensor | None = None
    """(batch, 1, sequence, sequence), True where a token is not seen; by default only later ones."""
    turns: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of rotary positions, each (batch or 1, 1, sequence, head size / 2)."""


PLAIN = Sight()


class LayerNorm(nn.Module):
    """Layer norm through the chosen backend; its weights stay fp32 in every precision.

    torch's bf16 backward sums their gradients in bf16 and was seen to be off by 4.0 in 118.
    """

    def __init__(self, config: ModelConfig, ops: native.Choice) -> None:
        super().__init__()
        self.cuts = {"weight": Cut(partial=True), "bias": Cut(partial=True)}
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.hidden))
        self.eps = config.eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class ColumnLinear(nn.Module):
    """A matrix cut by its outputs: every rank has its part of each of the `sections` of the result."""

    def __init__(self, inputs: int, sections: tuple[int, ...], parallel: Parallel) -> None:
        super().__init__()
        own = sum(sections) // parallel.size
        self.weight = nn.Parameter(torch.zeros(own, inputs))
        self.bias = nn.Parameter(torch.zeros(own))
        self.cuts = {"weight": Cut(0, sections), "bias": Cut(0, sections)}
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.parallel.enter(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """A matrix cut by its inputs: the ranks' results are summed, and the bias is added once."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs // parallel.size))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.cuts = {"weight": Cut(1), "bias": Cut(partial=True)}
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return F.linear(x, self.weight, self.bias)
        return self.parallel.leave(F.linear(x, self.weight)) + self.bias


class TokenTable(nn.Module):
    """The embedding of tokens, and the output that is tied to it; cut by rows among the ranks.

    Its padding (to a multiple of 128 rows a rank) starts at zero and never enters the loss, so it gets no
    gradient and stays zero: the padded model computes exactly what the logical one does.
    """

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel) -> None:
        super().__init__()
        rows = config.padded(parallel.size) // parallel.size
        self.weight = nn.Parameter(torch.zeros(rows, config.hidden))
        self.cuts = {"weight": Cut(0, rows=config.vocab)}
        self.first = rows * parallel.rank
        self.real = min(rows, max(0, config.vocab - self.first))  # rows of this rank that are no padding
        self.vocab, self.ops, self.parallel = config.vocab, ops, parallel

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence or this rank's part of it, hidden)."""
        if self.parallel.size == 1:
            return F.embedding(tokens, self.weight)
        own = tokens - self.first
        elsewhere = (own < 0) | (own >= len(self.weight))
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.parallel.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    def logits(self, x: Tensor) -> Tensor:
        """Of every token of the vocabulary, whole on every rank; for reading, not for training."""
        own = F.linear(self.parallel.enter(x), self.weight)
        return self.parallel.gather(own, -1)[..., : self.vocab]

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not -100."""
        if self.parallel.size == 1:
            return self.ops.linear_cross_entropy(x.flatten(0, 1), self.weight, targets.flatten(), self.vocab)
        own = F.linear(self.parallel.enter(x), self.weight)[..., : self.real]
        return cross_entropy(own.flatten(0, 1), targets.flatten(), self.first, self.parallel)


class PositionTable(nn.Module):
    """Learned positions; every rank has all of them."""

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.cuts = {"weight": Cut(partial=True)}
        self.weight = nn.Parameter(torch.zeros(config.position_rows, config.hidden))
        self.parallel = parallel

    def forward(self, at: Tensor) -> Tensor:
        """Of (sequence,) or (batch, sequence); with sequence parallel, of this rank's part of the sequence."""
        if self.parallel.divides_sequence:
            at = at.chunk(self.parallel.size, -1)[self.parallel.rank]
        return F.embedding(at, self.weight)


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values; a group of queries may share its keys."""

    def __init__(
        self, config: ModelConfig, ops: native.Choice, parallel: Parallel, recompute: Recompute
    ) -> None:
        super().__init__()
        self.heads, self.groups = config.heads // parallel.size, config.groups // parallel.size
        self.size, self.dropout = config.head_size, config.dropout
        keys = config.groups * config.head_size
        self.qkv = ColumnLinear(config.hidden, (config.hidden, keys, keys), parallel)
        self.out = RowLinear(config.hidden, config.hidden, parallel)
        self.ops, self.recompute = ops, recompute

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        mixed = self.qkv(x)
        widths = [heads * self.size for heads in (self.heads, self.groups, self.groups)]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in mixed.split(widths, -1))
        if sight.turns is not None:
            q, k = turned(q, *sight.turns), turned(k, *sight.turns)
        if self.groups != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        mixed = self.recompute.scores(self._mix, q, k, v, sight.hidden)  # (batch, heads, sequence, head size)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            return self.ops.attention(q, k, v, causal=True)
        return F.scaled_dot_product_attention(q, k, v, ~hidden)


class FeedForward(nn.Module):
    """hidden -> inner -> GELU -> hidden, or with SwiGLU hidden -> silu(gate) x up -> hidden."""

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel) -> None:
        super().__init__()
        sections = (config.inner,) * (2 if config.swiglu else 1)
        self.up = ColumnLinear(config.hidden, sections, parallel)
        self.down = RowLinear(config.inner, config.hidden, parallel)
        self.gated, self.dropout = config.swiglu, config.dropout
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.gated:
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = self.ops.gelu(inner, self.approximate)
        return F.dropout(self.down(inner), self.dropout, self.training)


class Block(nn.Module):
    """Attention and feed-forward, each after its layer norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        ops: native.Choice,
        parallel: Parallel = ALONE,
        recompute: Recompute = NOTHING,
    ) -> None:
        super().__init__()
        self.norm_1 = LayerNorm(config, ops)
        self.attention = Attention(config, ops, parallel, recompute)
        self.norm_2 = LayerNorm(config, ops)
        self.feed_forward = FeedForward(config, ops, parallel)

    def forward(self, x: Tensor, sight: Sight = PLAIN) -> Tensor:
        x = x + self.attention(self.norm_1(x), sight)
        x = x + self.feed_forward(self.norm_2(x))
        return x


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + half) of a head's numbers, turned by an angle that the position tells."""
    one, two = x.chunk(2, -1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    return torch.cat([one * cosines - two * sines, two * cosines + one * sines], -1)


def turns(at: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the positions `at`, (sequence,) or (batch, sequence)."""
    pairs = torch.arange(0, head_size, 2, device=at.device, dtype=torch.float32)
    angles = at.float().unsqueeze(-1) * torch.exp(pairs * (-math.log(ROTARY_BASE) / head_size))
    angles = angles.view(-1, 1, *angles.shape[-2:])
    return angles.cos(), angles.sin()


def residual_deviation(config: ModelConfig) -> float:
    """GPT-2's initial deviation of what writes into the residual stream."""
    return config.init_std / math.sqrt(2 * config.layers)
