"""Self-attention; its steps are separate methods, which generation calls with a cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from trainer.config.model import ModelConfig
from trainer.model.linear import ColumnLinear, RowLinear
from trainer.model.masks import future, outside
from trainer.model.norm import Norm
from trainer.model.recompute import Recompute
from trainer.model.rotary import Turns, turned
from trainer.parallel.tensor import ALONE, Parallel


@dataclass(frozen=True)
class Sight:
    """What the blocks of one pass share: the attention mask and the rotary positions."""

    hidden: Tensor | None = None
    """Mask (batch, 1, sequence, sequence), True where a token is hidden; None hides later tokens."""
    turns: Turns | None = None
    """Rotary positions."""
    context: Parallel = ALONE
    """Ranks that have other stretches of the same samples."""
    aux_weight: float = 0.0
    """What the auxiliary loss of experts counts in the loss of the step."""
    apart: tuple[tuple[int, ...], ...] = ()
    """The lengths of each row's examples, where these do not see each other and no mask says so."""
    window: int = 0
    """Tokens that a token of such an example sees; 0: all before it."""


PLAIN = Sight()


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values; a group of queries may share its keys."""

    def __init__(
        self, config: ModelConfig, ops: native.Choice, parallel: Parallel, recompute: Recompute
    ) -> None:
        super().__init__()
        self.heads, self.groups = config.heads // parallel.size, config.groups // parallel.size
        self.size, self.dropout = config.head_size, config.dropout
        self.attention_dropout, self.parallel = config.attention_dropout, parallel
        self.interleaved = config.rope.interleaved
        queries, keys = config.attention_width, config.groups * config.head_size
        self.qkv = ColumnLinear(config.hidden, (queries, keys, keys), parallel, config.bias != "none")
        self.out = RowLinear(queries, config.hidden, parallel, config.bias == "all")
        self.q_norm, self.k_norm = (
            Norm(config, ops, self.size, parallel) if config.qk_norm else None for _ in range(2)
        )
        self.ops, self.recompute = ops, recompute

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        q, k, v = self.project(x)
        if sight.turns is not None:
            q, k = self.rotate(q, k, sight.turns)
        if sight.context.size > 1:
            # Up to the last one of this rank's queries.
            seen = k.shape[2] * (sight.context.rank + 1)
            k, v = (sight.context.whole(part, 2)[:, :, :seen] for part in (k, v))
        if sight.apart:
            return self.output(self._attend_apart(q, k, v, sight))
        return self.output(self.attend(q, k, v, sight.hidden))

    def _attend_apart(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        """Return the mix of values of each example for its own queries: no score of two examples is computed."""
        rows = []
        for row, lengths in enumerate(sight.apart):
            parts = (part[row : row + 1].split(lengths, 2) for part in (q, k, v))
            mixed = list[Tensor]()
            for queries, keys, values in zip(*parts, strict=True):
                length, window = queries.shape[2], sight.window
                hidden = outside(length, window, q.device) if 0 < window < length else None
                mixed.append(self.attend(queries, keys, values, hidden))
            rows.append(torch.cat(mixed, 2))
        return torch.cat(rows)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's queries, keys and values, (batch, heads or groups, sequence, head size)."""
        mixed = self.qkv(x)
        widths = [heads * self.size for heads in (self.heads, self.groups, self.groups)]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in mixed.split(widths, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Return queries and keys rotated by their positions; `turns` as `rotary.turns` gives them."""
        return turned(q, *turns, self.interleaved), turned(k, *turns, self.interleaved)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the mix of values for each query, (batch, heads, queries, head size).

        `hidden` is True where a query does not see a key; None hides keys after a query, and the last query is at the
        last key.
        """
        if self.groups != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        draws = bool(self.attention_dropout and self.training)
        return self.recompute.scores(self._mix, q, k, v, hidden, draws=draws)

    def output(self, mixed: Tensor) -> Tensor:
        """Return what attention adds to the residual stream, (batch, sequence, hidden)."""
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
