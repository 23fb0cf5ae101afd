"""The layers of both models. Fused ops come from `native`, exchanges between ranks from `parallel`.

A rank's part of a layer has some of its heads and some of its inner width; with one rank, all of them.

Parameters under logical names: whole and unpadded in a checkpoint, cut and padded on a rank.

Names and whole shapes are the same in every layout, so what one layout saved any other loads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from trainer.config.model_sizes import ModelConfig
from trainer.model.masks import future
from trainer.model.recompute import NOTHING, Recompute
from trainer.parallel.tensor import ALONE, Parallel, column_linear, cross_entropy

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Sight:
    """What the blocks of one pass share: the attention mask and the rotary positions."""

    hidden: Tensor | None = None
    """Mask (batch, 1, sequence, sequence), True where a token is hidden; None hides later tokens."""
    turns: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of rotary positions, each (batch or 1, 1, sequence, head size / 2)."""


PLAIN = Sight()


class LayerNorm(nn.Module):
    """Layer norm by the chosen backend; its weights stay fp32 in every precision.

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
    """A matrix divided by outputs (columns): each rank has its part of every section of the result."""

    def __init__(self, inputs: int, sections: tuple[int, ...], parallel: Parallel) -> None:
        super().__init__()
        own = sum(sections) // parallel.size
        self.weight = nn.Parameter(torch.zeros(own, inputs))
        self.bias = nn.Parameter(torch.zeros(own))
        self.cuts = {"weight": Cut(0, sections), "bias": Cut(0, sections)}
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.parallel)


class RowLinear(nn.Module):
    """A matrix divided by inputs (rows): the ranks' results are summed, and the bias is added once."""

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
    """The token embedding and the output matrix tied to it, divided by rows among the ranks.

    Its padding (to a multiple of 128 rows a rank) starts at zero and never enters the loss, so it gets no
    gradient and stays zero: the padded model computes exactly what the logical one does.
    """

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel) -> None:
        super().__init__()
        rows = config.padded(parallel.size) // parallel.size
        self.weight = nn.Parameter(torch.zeros(rows, config.hidden))
        self.cuts = {"weight": Cut(0, rows=config.vocab)}
        self.first = rows * parallel.rank
        # rows of this rank that are no padding.
        self.real = min(rows, max(0, config.vocab - self.first))
        self.vocab, self.ops, self.parallel = config.vocab, ops, parallel

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, sequence or this rank's part of it, hidden)."""
        if self.parallel.size == 1:
            return F.embedding(tokens, self.weight)
        own = tokens - self.first
        elsewhere = (own < 0) | (own >= len(self.weight))
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.parallel.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary on every rank; without gradient."""
        own = column_linear(x, self.weight, None, self.parallel)
        return self.parallel.gather(own, -1)[..., : self.vocab]

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the targets that are not -100."""
        if self.parallel.size == 1:
            return self.ops.linear_cross_entropy(x.flatten(0, 1), self.weight, targets.flatten(), self.vocab)
        own = column_linear(x, self.weight, None, self.parallel)[..., : self.real]
        return cross_entropy(own.flatten(0, 1), targets.flatten(), self.first, self.parallel)


class PositionTable(nn.Module):
    """Learned positions; every rank has all of them."""

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.cuts = {"weight": Cut(partial=True)}
        self.weight = nn.Parameter(torch.zeros(config.position_rows, config.hidden))
        self.parallel = parallel

    def forward(self, at: Tensor) -> Tensor:
        """Return embeddings of positions `at`; with sequence parallel, of this rank's part of them."""
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
        self.attention_dropout, self.parallel = config.attention_dropout, parallel
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
        # (batch, heads, sequence, head size)
        draws = bool(self.attention_dropout and self.training)
        mixed = self.recompute.scores(self._mix, q, k, v, sight.hidden, draws=draws)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        if self.attention_dropout and self.training:
            return self._mix_with_dropout(q, k, v, hidden)
        if hidden is None:
            return self.ops.attention(q, k, v, causal=True)
        return F.scaled_dot_product_attention(q, k, v, ~hidden)

    def _mix_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            hidden = future(q.shape[-2], q.device)
        scores = (q * self.size**-0.5) @ k.transpose(-2, -1)  # (batch, heads, sequence, sequence)
        probabilities = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return self._dropped(probabilities) @ v

    def _dropped(self, probabilities: Tensor) -> Tensor:
        """Drop probabilities of this rank's heads, with other random numbers than those of other ranks' heads.

        Tensor parallel ranks without sequence parallel draw the same numbers, so that they drop the same activations
        between the matrices. Each draws for the heads of all ranks, in order, and uses those for its own.
        """
        if self.parallel.size == 1 or self.parallel.sequence:
            return F.dropout(probabilities, self.attention_dropout)
        dropped = [F.dropout(probabilities, self.attention_dropout) for _ in range(self.parallel.rank + 1)][
            -1
        ]
        for _ in range(self.parallel.rank + 1, self.parallel.size):
            # Leaves the generator in the same state on every rank.
            F.dropout(probabilities.detach(), self.attention_dropout)
        return dropped


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
    """Return `x` with rotary positions: each pair (i, i + half) of a head is rotated by an angle of its position."""
    first, second = x.chunk(2, -1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def turns(at: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for the positions `at`, (sequence,) or (batch, sequence)."""
    pairs = torch.arange(0, head_size, 2, device=at.device, dtype=torch.float32)
    angles = at.float().unsqueeze(-1) * torch.exp(pairs * (-math.log(ROTARY_BASE) / head_size))
    angles = angles.view(-1, 1, *angles.shape[-2:])
    return angles.cos(), angles.sin()


def residual_deviation(config: ModelConfig) -> float:
    """Return GPT-2's initial deviation of matrices that write into the residual stream."""
    return config.init_std / math.sqrt(2 * config.layers)


@dataclass(frozen=True)
class Cut:
    """How one parameter is divided among the tensor parallel ranks."""

    dim: int | None = None
    """The divided dimension; None: every rank has the whole parameter."""
    sections: tuple[int, ...] = ()
    """Sizes along `dim` of sections that are divided separately (queries, keys, values)."""
    rows: int | None = None
    """Rows without padding; on a rank rows of zeros follow."""
    partial: bool = False
    """Whether, with sequence parallel, the gradients of the ranks must be summed."""

    def whole_shape(self, own: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of the whole parameter, from the shape `own` on each of `size` ranks."""
        shape = list(own)
        if self.dim is not None:
            shape[self.dim] *= size
        if self.rows is not None:
            shape[0] = self.rows
        return tuple(shape)

    def take(self, whole: Tensor, rows: int, parallel: Parallel) -> Tensor:
        """Return this rank's part of a whole; `rows`: rows of the part, padding included."""
        if self.rows is not None:
            whole = F.pad(whole, (0, 0, 0, rows * parallel.size - self.rows))
        if self.dim is None or parallel.size == 1:
            return whole
        sections = whole.split(self.sections or whole.shape[self.dim], self.dim)
        return torch.cat([part.chunk(parallel.size, self.dim)[parallel.rank] for part in sections], self.dim)


WHOLE = Cut()
INTO_RESIDUAL = ("attention.out.weight", "feed_forward.down.weight")


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Return the cut of each parameter, from the `cuts` of the module that owns it."""
    found = {}
    for path, module in model.named_modules():
        own: Mapping[str, Cut] = getattr(module, "cuts", {})
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}" if path else name] = own.get(name, WHOLE)
    return found


@torch.no_grad()
def initialize(model: nn.Module, std: float, into_residual: float, seed: int, parallel: Parallel) -> None:
    """Draw matrices from normal(0, std), those that write into the residual from normal(0, into_residual).

    Each is drawn whole by a generator of its own name and then cut: every layout begins with the same model.
    """
    cuts = cuts_of(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or parameter.is_meta:
            # Biases and layer norms are already 0 and 1.
            continue
        whole = torch.empty(cuts[name].whole_shape(parameter.shape, parallel.size))
        deviation = into_residual if name.endswith(INTO_RESIDUAL) else std
        whole.normal_(0.0, deviation, generator=generator_of(seed, name))
        parameter.copy_(cuts[name].take(whole, parameter.shape[0], parallel))


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a generator seeded by `seed` and `name`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def own_of(key: str, whole: Tensor, like: Tensor, cuts: Mapping[str, Cut], parallel: Parallel) -> Tensor:
    """Return this rank's part of `whole`, shaped as `like`."""
    return cuts[parameter_of(key, cuts)].take(whole, like.shape[0], parallel)


def parameter_of(key: str, cuts: Mapping[str, Cut]) -> str:
    """Return the name of the parameter that a tensor of a state belongs to."""
    return key if key in cuts else key.split(".", 1)[1]
