"""Multi-head attention, whose groups of queries may share keys; over a sequence, or over the pages of a cache."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

import native
from native import reference
from native.masks import EVERY_KEY
from native.philox import draws_itself
from trainer.config.model import ModelConfig
from trainer.model.attention.sight import Sight, picked
from trainer.model.cuts import Cut
from trainer.model.linear import ColumnLinear, RowLinear, Source
from trainer.model.norm import head_norm_of
from trainer.model.recompute import Recompute
from trainer.parallel.tensor import Parallel


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values; a group of queries may share its keys."""

    def __init__(
        self, config: ModelConfig, ops: native.Choice, parallel: Parallel, recompute: Recompute
    ) -> None:
        super().__init__()
        self.set_up(config, ops, parallel, recompute)
        sizes = config.attention
        sections = tuple(sizes.sections.values())
        self.qkv = ColumnLinear(config.hidden, sections, parallel, config.bias != "none")
        self.out = RowLinear(sizes.width, config.hidden, parallel, config.bias == "all")
        self.q_norm, self.k_norm = (
            head_norm_of(config, ops, count, self.size, parallel) if config.qk_norm else None
            for count in (self.heads, self.groups)
        )

    def set_up(
        self, config: ModelConfig, ops: native.Choice, parallel: Parallel, recompute: Recompute
    ) -> None:
        """Set what all kinds of attention have."""
        sizes = config.attention
        own = sizes.part(parallel.size)
        self.heads, self.groups, self.size = own.heads, own.groups, own.size
        self.rotates, self.has_window, self.norms = config.rotary, config.window > 0, sizes.norms
        self.cap = config.attention_cap
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if config.sinks else None
        self.cuts = {"sinks": Cut(0)}
        self.factor = config.attention_scale * self.size**0.5 or 1.0
        """Factor of queries, so that scores / sqrt(size) have the config's scale."""
        self.attention_dropout, self.parallel = config.attention_dropout, parallel
        self.interleaved, self.by_products = config.rope.interleaved, sizes.plain
        self.ops, self.recompute = ops, recompute

    def forward(
        self, x: Tensor, sight: Sight, wanted: Tensor | None = None, source: Source | None = None
    ) -> Tensor:
        """Return what is added to the residual stream; `wanted`: compute it only for these rows of all samples.

        `source`: how the backward pass computes `x` again.
        """
        sight = self.own_sight(sight)
        q, k, v = self.project(x, source)
        if sight.turns is not None and self.rotates:
            q, k = self.rotate(q, k, sight.turns)
        if sight.context.size > 1:
            # Keys up to the position of this rank's last query.
            seen = k.shape[2] * (sight.context.rank + 1)
            k, v = (sight.context.whole(part, 2)[:, :, :seen] for part in (k, v))
        return self.output(self.attend(q, k, v, sight.mask), wanted)

    def project(self, x: Tensor, source: Source | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's queries, keys and values, (batch, heads or groups, sequence, head size)."""
        mixed = self.qkv(x) if source is None else self.qkv(x, source)
        widths = [self.size * count for count in (self.heads, self.groups, self.groups)]
        q, k, v = mixed.split_with_sizes(widths, -1)
        if self.norms == "all":
            q, k = self._normed(q, k)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (q, k, v))
        if self.norms == "heads":
            q, k = self._normed(q, k)
        return q if self.factor == 1.0 else q * self.factor, k, v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def own_sight(self, sight: Sight) -> Sight:
        """Return what this layer sees."""
        return sight.windowed if self.has_window and sight.windowed is not None else sight

    def rotate(self, q: Tensor, k: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of `project` rotated by their positions, in their memory where possible.

        `turns` is the result of `rotary.turns`.
        """
        return self.ops.rotary_(q, k, *turns, self.interleaved)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: native.Mask = EVERY_KEY) -> Tensor:
        """Return the weighted sum of values for each query, (batch, heads, queries, head size).

        Keys after a query are hidden, and those that `mask` hides; the last query is at the position of the last key.
        """
        draws = bool(self.attention_dropout and self.training)
        return self.recompute.scores(partial(self._mix, mask), q, k, v, draws=draws)

    def output(self, mixed: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Return what attention adds to the residual stream, before dropout: (batch, sequence, hidden)."""
        result: Tensor = self.out(picked(mixed.transpose(1, 2).flatten(2), wanted))
        return result

    def _mix(self, mask: native.Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.by_products:
            return reference.attention(q, k, v, True, mask, self._dropout(q.device), self.cap, self.sinks)
        return self.ops.attention(q, k, v, causal=True, mask=mask, dropout=self._dropout(q.device))

    def _dropout(self, device: torch.device) -> native.Dropout | None:
        """Draw the dropout state of this pass; the dropped probabilities differ between the ranks' heads.

        Tensor parallel ranks without sequence parallel draw the same seed, because they must drop the same activations
        between the matrices; for attention each rank numbers its heads among those of all ranks. Without them, a
        device with a generator of its own needs no state.
        """
        if not (self.attention_dropout and self.training):
            return None
        if draws_itself(device) and self.parallel.size == 1:
            return native.Dropout(self.attention_dropout)
        state = torch.randint(2**63 - 1, ())
        first = self.heads * self.parallel.rank
        return native.Dropout(self.attention_dropout, state, first, self.heads * self.parallel.size)


class Pages(Protocol):
    """For each layer of this rank, pages of keys and values."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Store the new tokens' keys and values, (tokens, groups, size); return the attention output, (tokens, ...)."""


class CachedAttention(nn.Module):
    """The attention of a layer over the cache's pages."""

    def __init__(self, own: Attention, cache: Pages, layer: int) -> None:
        super().__init__()
        self.own, self.cache, self.layer = own, cache, layer

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        q, k, v = self.own.project(x)  # (1, heads or groups, tokens, head size)
        turning = self.own.own_sight(sight).turns
        if turning is not None and self.own.rotates:
            q, k = self.own.rotate(q, k, turning)
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
        mixed = self.cache.attend(self.layer, q, k, v, self.own.sinks)
        return self.own.output(mixed.transpose(0, 1).unsqueeze(0))
