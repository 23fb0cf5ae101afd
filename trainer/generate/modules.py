"""Replacements for a model's modules, packed matrices and tables; and the paged cache of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from native.decode import paged
from native.decode.matrix import Matrix
from native.decode.packed import Packed
from native.decode.paged import PAGE, Spans
from native.paging import Reach
from native.reference import capped
from trainer.config.attention import Heads
from trainer.engine.passes import Model
from trainer.model.cuts import WHOLE, cuts_of
from trainer.model.layers import TokenTable
from trainer.model.linear import ColumnLinear, RowLinear
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


class PagedCache:
    """For each layer of this rank, pages of keys and values; the memory is that of a CPU or of a device."""

    device: str
    layers: list[tuple[Tensor, Tensor]]

    def begin(self, step: Step) -> Step:
        """Return the step with its tensors on the cache's device; later calls of `attend` are for this step."""
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store the new tokens' keys and values, (tokens, groups, size); return the attention output, (tokens, ...)."""
        raise NotImplementedError

    def copy(self, source: int, target: int) -> None:
        """Copy page `source` to page `target` in every layer."""
        for keys, values in self.layers:
            keys[target] = keys[source]
            values[target] = values[source]


class Cache(PagedCache):
    """Pages in CPU memory, and the step that is being computed."""

    device = "cpu"

    def __init__(self, heads: Sequence[Heads], pages: int) -> None:
        """`heads`: those of this rank, in each layer."""
        self.heads = heads
        self.layers = [paged.pages(pages, *own.pages) for own in heads]
        self.spans: dict[int, Spans] = {}

    def begin(self, step: Step) -> Step:
        self.spans = {own.window: within(step.spans, own.window) for own in self.heads}
        return step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        keys, values = self.layers[layer]
        spans, scale, cap = self.spans[self.heads[layer].window], q.shape[2] ** -0.5, self.heads[layer].cap
        if self.heads[layer].pages[2]:
            keys[spans.slots // PAGE, :, :, spans.slots % PAGE] = k
        else:
            paged.store(k, v, keys, values, spans.slots)
        if self.heads[layer].plain:
            return paged.reference(q, keys, values, spans, scale, cap, sinks)
        return paged.attend(q, keys, values, spans, scale)


Seen = TypeVar("Seen", Spans, Reach)


def within(spans: Seen, window: int) -> Seen:
    """Return the spans of tokens that see at most `window` positions, their own last; 0: the same spans."""
    return replace(spans, first=torch.maximum(spans.first, spans.last - window)) if window else spans


def page_bytes(heads: Sequence[Heads], each: int = 4) -> int:
    """Return the bytes of one page in layers with these heads; `each`: the bytes of one number."""
    return sum(own.cached for own in heads) * PAGE * each


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

    def __init__(self, packed: Packed | Matrix, own: TokenTable) -> None:
        super().__init__()
        self.packed, self.vocab, self.parallel, self.cap = packed, own.vocab, own.parallel, own.cap

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
        return capped(self.parallel.gather(own, -1)[..., : self.vocab], self.cap)


def fill(
    model: Model,
    read: Callable[[str], Tensor],
    pack: Callable[[Tensor, Tensor | None], Packed | Matrix],
    parallel: Parallel,
    multiple: int = 1,
    moved: Callable[[nn.Module, Tensor], Tensor] = lambda module, own: own,
) -> None:
    """Fill a model whose parameters have no memory: `pack` makes its matrices and tables, `moved` other parameters.

    read: returns one whole parameter by name, in fp32. multiple: of the rows of a table that no ranks divide.
    """
    own = _reader(model, read, parallel)
    for path, module in list(model.named_modules()):
        if isinstance(module, (ColumnLinear, RowLinear, TokenTable)):
            exchange(model, path, _packed(module, path, own, pack, multiple))
        else:
            for name, _ in list(module.named_parameters(recurse=False)):
                parameter = nn.Parameter(moved(module, own(f"{path}.{name}")), requires_grad=False)
                setattr(module, name, parameter)


def _reader(model: Model, read: Callable[[str], Tensor], parallel: Parallel) -> Callable[[str], Tensor]:
    """Return a function that reads this rank's part of a parameter."""
    if parallel.size == 1:
        return read
    cuts = cuts_of(model)
    rows = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
    return lambda name: cuts.get(name, WHOLE).take(read(name), rows[name], parallel).clone()


def _packed(
    module: ColumnLinear | RowLinear | TokenTable,
    path: str,
    read: Callable[[str], Tensor],
    pack: Callable[[Tensor, Tensor | None], Packed | Matrix],
    multiple: int,
) -> nn.Module:
    weight, parallel = read(f"{path}.weight"), module.parallel
    if isinstance(module, TokenTable):
        more = -len(weight) % multiple if parallel.size == 1 else 0
        return PackedTable(pack(F.pad(weight, (0, 0, 0, more)) if more else weight, None), module)
    bias = read(f"{path}.bias") if module.bias is not None else None
    if isinstance(module, ColumnLinear):
        return PackedLinear(pack(weight, bias))
    # The ranks' results are summed, so only one rank adds the bias.
    return PackedRowLinear(pack(weight, bias if parallel.rank == 0 else None), parallel)


def exchange(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path` of a model by `module`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
