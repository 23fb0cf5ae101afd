"""Modules that replace a model's own: packed matrices and tables, and attention over the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from native.decode import paged
from native.decode.packed import Packed
from native.decode.paged import PAGE, Spans
from trainer.config.model import ModelConfig
from trainer.model.attention import Attention, Sight
from trainer.parallel.tensor import Parallel


@dataclass(frozen=True)
class Step:
    """The new tokens of a batch."""

    ids: Tensor
    """(tokens)"""
    positions: Tensor
    """(tokens); for a GLM (2, tokens)"""
    spans: Spans
    wanted: Tensor
    """Indices of the tokens whose logits are wanted."""


class Cache:
    """Pages of keys and values for each layer of this rank, and the step that is being computed."""

    def __init__(self, config: ModelConfig, pages: int, layers: int, ranks: int = 1) -> None:
        """`ranks`: those that divide the heads of each layer."""
        groups = config.groups // ranks
        self.layers = [paged.pages(pages, groups, config.head_size) for _ in range(layers)]
        self.step: Step | None = None

    def copy(self, source: int, target: int) -> None:
        """Copy a page in every layer."""
        for keys, values in self.layers:
            keys[target] = keys[source]
            values[target] = values[source]


def page_bytes(config: ModelConfig) -> int:
    """Return the bytes of one page in all layers."""
    return 2 * config.layers * config.groups * config.head_size * PAGE * 4


class PackedLinear(nn.Module):
    """A packed matrix in the place of a layer's own."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x[0]).unsqueeze(0)


class PackedRowLinear(PackedLinear):
    """A packed matrix of which tensor parallel ranks have parts of the inputs; the first one has the bias."""

    def __init__(self, packed: Packed, parallel: Parallel) -> None:
        super().__init__(packed)
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.sum(super().forward(x).contiguous())


class PackedTable(nn.Module):
    """The token table: embeddings, and logits of a few rows; tensor parallel ranks have `vocab` rows together."""

    def __init__(self, packed: Packed, vocab: int, parallel: Parallel) -> None:
        super().__init__()
        self.packed, self.vocab, self.parallel = packed, vocab, parallel

    def forward(self, tokens: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return self.packed.rows(tokens)
        own = tokens - self.packed.outputs * self.parallel.rank
        elsewhere = (own < 0) | (own >= self.packed.outputs)
        found = self.packed.rows(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self.parallel.sum(found)

    def logits(self, x: Tensor) -> Tensor:
        return self.whole(self.packed(x))

    def whole(self, own: Tensor) -> Tensor:
        """Return the logits of all ids from those of this rank's rows."""
        return self.parallel.gather(own, -1)[..., : self.vocab]


class CachedAttention(nn.Module):
    """The attention of a layer over the cache's pages."""

    def __init__(self, own: Attention, cache: Cache, layer: int) -> None:
        super().__init__()
        self.own, self.cache, self.layer, self.scale = own, cache, layer, own.size**-0.5

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        step = self.cache.step
        assert step is not None
        q, k, v = self.own.project(x)  # (1, heads or groups, tokens, head size)
        if sight.turns is not None:
            q, k = self.own.rotate(q, k, sight.turns)
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
        keys, values = self.cache.layers[self.layer]
        paged.store(k, v, keys, values, step.spans.slots)
        mixed = paged.attend(q, keys, values, step.spans, self.scale)
        return self.own.output(mixed.transpose(0, 1).unsqueeze(0))


def exchange(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` in the place `path` of a model."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
