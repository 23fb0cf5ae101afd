"""Replacements for a model's modules: packed matrices and tables, and attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from native.decode import paged
from native.decode.matrix import Matrix
from native.decode.packed import Packed
from native.decode.paged import PAGE, Spans
from trainer.config.model import ModelConfig
from trainer.model.attention import Attention, Sight
from trainer.parallel.tensor import Parallel


@dataclass(frozen=True)
class Step:
    """The new tokens of a batch."""

    ids: Tensor
    """Shape (tokens)."""
    positions: Tensor
    """Shape (tokens); for a GLM (2, tokens)."""
    spans: Spans
    wanted: Tensor
    """Indices of the tokens whose logits are wanted."""


class PagedCache(Protocol):
    """For each layer of this rank, pages of keys and values; the memory is that of a CPU or of a device."""

    device: str
    layers: list[tuple[Tensor, Tensor]]

    def begin(self, step: Step) -> Step:
        """Return the step with its tensors on the cache's device; later calls of `attend` are for this step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' keys and values, (tokens, groups, size); return the attention output, (tokens, ...)."""

    def copy(self, source: int, target: int) -> None:
        """Copy page `source` to page `target` in every layer."""


class Cache:
    """For each layer of this rank, pages of keys and values in CPU memory; and the step that is being computed."""

    device = "cpu"

    def __init__(self, config: ModelConfig, pages: int, layers: int, ranks: int = 1) -> None:
        """`ranks`: the number of ranks that divide the heads of each layer."""
        own = config.attention.part(ranks)
        self.layers = [paged.pages(pages, own.groups, own.size) for _ in range(layers)]
        self.step: Step | None = None

    def begin(self, step: Step) -> Step:
        """Return the step itself; later calls of `attend` are for this step."""
        self.step = step
        return step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' keys and values, (tokens, groups, size); return the attention output, (tokens, ...)."""
        assert self.step is not None
        keys, values = self.layers[layer]
        paged.store(k, v, keys, values, self.step.spans.slots)
        return paged.attend(q, keys, values, self.step.spans, q.shape[2] ** -0.5)

    def copy(self, source: int, target: int) -> None:
        """Copy page `source` to page `target` in every layer."""
        for keys, values in self.layers:
            keys[target] = keys[source]
            values[target] = values[source]


def page_bytes(config: ModelConfig, each: int = 4) -> int:
    """Return the bytes of one page in all layers; `each`: the bytes of one number."""
    return config.attention.cached(config.layers) * PAGE * each


class PackedLinear(nn.Module):
    """A packed matrix that replaces a linear layer."""

    def __init__(self, packed: Packed | Matrix) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


class PackedRowLinear(PackedLinear):
    """This tensor parallel rank's columns of a packed matrix; the results are summed. Only rank 0 has the bias."""

    def __init__(self, packed: Packed | Matrix, parallel: Parallel) -> None:
        super().__init__(packed)
        self.parallel = parallel

    def forward(self, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        own = super().forward(x if activation is None else activation(x))
        return own if self.parallel.size == 1 else self.parallel.sum(own.float().contiguous())


class PackedTable(nn.Module):
    """The token table, for embeddings and logits; all tensor parallel ranks together have `vocab` rows."""

    def __init__(self, packed: Packed | Matrix, vocab: int, parallel: Parallel) -> None:
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
        return self.whole(self.packed(x)).float()

    def whole(self, own: Tensor) -> Tensor:
        """Return the logits of all ids; `own` are the logits of this rank's rows."""
        return self.parallel.gather(own, -1)[..., : self.vocab]


class CachedAttention(nn.Module):
    """The attention of a layer over the cache's pages."""

    def __init__(self, own: Attention, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self.own, self.cache, self.layer = own, cache, layer

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        q, k, v = self.own.project(x)  # (1, heads or groups, tokens, head size)
        if sight.turns is not None:
            q, k = self.own.rotate(q, k, sight.turns)
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
        mixed = self.cache.attend(self.layer, q, k, v)
        return self.own.output(mixed.transpose(0, 1).unsqueeze(0))


def exchange(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path` of a model by `module`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
