"""Latent attention: keys and values are made of one narrow latent per token, which alone is cached.

A query and a key have a part that is rotated, which all heads of a key share, and a part that is not. Here the rotated
part comes first. Over a cache, the matrix that makes keys of latents is applied to the queries instead, and the one
that makes values to the result, so that heads attend to the latents themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import native
from trainer.config.model import ModelConfig
from trainer.model.attention.heads import Attention, Pages
from trainer.model.attention.sight import Sight
from trainer.model.cuts import Cut
from trainer.model.linear import ColumnLinear, RowLinear, Source
from trainer.model.norm import Norm
from trainer.model.recompute import Recompute
from trainer.parallel.tensor import ALONE, SEQUENCE, Parallel, column_linear

# The norms of latents have this eps in every model.
EPS = 1e-6


class WholeLinear(ColumnLinear):
    """A matrix that every tensor parallel rank has whole."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, (outputs,), ALONE, bias=False)
        self.cuts = {"weight": Cut(partial=True)}


class HeadMatrices(nn.Module):
    """The matrices that make keys and values of latents, of this rank's heads."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs // parallel.size, inputs))
        self.cuts, self.parallel = {"weight": Cut(0)}, parallel

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, None, self.parallel)


class LatentAttention(Attention):
    """Self-attention over latents of keys and values; queries may have latents too."""

    def __init__(
        self, config: ModelConfig, ops: native.Choice, parallel: Parallel, recompute: Recompute
    ) -> None:
        nn.Module.__init__(self)
        self.set_up(config, ops, parallel, recompute)
        self.rank, self.turned, self.value = config.kv_rank, config.rope_dim, config.value_dim
        self.plain = self.size - self.turned
        """The width of the part that is not rotated."""
        heads, rank = config.heads, config.q_rank
        self.q_down = WholeLinear(config.hidden, config.q_rank) if config.q_rank else None
        self.q_norm = self._norm(config, ops, config.q_rank) if config.q_rank else None
        width = (heads * self.size,)
        self.q_up = ColumnLinear(rank, width, parallel, bias=False) if rank else None
        self.q = None if rank else ColumnLinear(config.hidden, width, parallel, bias=False)
        self.kv_down = WholeLinear(config.hidden, self.rank + self.turned)
        self.kv_norm = self._norm(config, ops, self.rank)
        self.kv_up = HeadMatrices(self.rank, heads * (self.plain + self.value), parallel)
        self.out = RowLinear(heads * self.value, config.hidden, parallel, bias=False)

    def _norm(self, config: ModelConfig, ops: native.Choice, width: int) -> Norm:
        norm = Norm(config, ops, width)
        norm.cuts, norm.eps = {"weight": Cut(partial=True)}, EPS
        return norm

    def project(self, x: Tensor, source: Source | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, (latents, turned) = self.queries(x), self.latents(x)
        made = self.kv_up(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = made.split_with_sizes((self.plain, self.value), -1)
        parallel = self.parallel
        turned = parallel.whole(turned, SEQUENCE) if parallel.divides_sequence else parallel.enter(turned)
        shared = turned.unsqueeze(1).expand(-1, self.heads, -1, -1)
        return q, torch.cat([shared, k], -1), v

    def queries(self, x: Tensor) -> Tensor:
        """Return this rank's queries, (batch, heads, sequence, size), of which the first numbers are rotated."""
        if self.q is not None:
            mixed = self.q(x)
        else:
            assert self.q_down is not None and self.q_norm is not None and self.q_up is not None
            mixed = self.q_up(self.q_norm(self.q_down(x)))
        q = mixed.unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        q = torch.cat(q.split_with_sizes((self.plain, self.turned), -1)[::-1], -1)
        return q if self.factor == 1.0 else q * self.factor

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents, (batch, sequence, rank), and the part of keys that is rotated."""
        latents, turned = self.kv_down(x).split_with_sizes((self.rank, self.turned), -1)
        return self.kv_norm(latents), turned


class CachedLatents(nn.Module):
    """The attention of a layer over the latents in the cache's pages."""

    def __init__(self, own: LatentAttention, cache: Pages, layer: int) -> None:
        super().__init__()
        self.own, self.cache, self.layer = own, cache, layer

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        own = self.own
        q, (latents, turned) = own.queries(x), own.latents(x)
        k = turned.unsqueeze(1)
        if sight.turns is not None:
            q, k = own.rotate(q, k.contiguous(), sight.turns)
        matrices = own.kv_up.weight.to(q.dtype).unflatten(0, (own.heads, -1))
        of_keys, of_values = matrices.split_with_sizes((own.plain, own.value), 1)
        turning, plain = q[0].split_with_sizes((own.turned, own.plain), -1)  # (heads, tokens, ...)
        absorbed = torch.cat([plain @ of_keys, turning], -1).transpose(0, 1)
        # The cache divides scores by the root of the size that it sees.
        absorbed = absorbed * (absorbed.shape[-1] / own.size) ** 0.5
        c = latents[0].to(k.dtype).unsqueeze(1)
        mixed = self.cache.attend(self.layer, absorbed, torch.cat([c, k[0].transpose(0, 1)], -1), c, None)
        values = mixed.to(of_values.dtype).transpose(0, 1) @ of_values.transpose(1, 2)
        return own.output(values.unsqueeze(0))
