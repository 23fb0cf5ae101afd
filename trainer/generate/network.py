"""A model that computes new tokens over a paged cache, with weights packed in fp32, bf16 or 8 bits.

The model's own modules run as in training, with three exchanged: matrices, the token table, and attention, which keeps
keys and values in pages. All new tokens of a batch are one row of tokens: (1, tokens, hidden).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import native
from native.compiled import library
from native.decode import paged
from native.decode.packed import Packed
from native.decode.paged import PAGE, Spans
from native.registry import REFERENCE
from trainer.config.model import ModelConfig
from trainer.engine.passes import Model
from trainer.model.attention import Attention, Sight
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.model.layers import TokenTable
from trainer.model.linear import ColumnLinear, RowLinear
from trainer.model.rotary import turns


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
    """Pages of keys and values for each layer, and the step that is being computed."""

    def __init__(self, config: ModelConfig, pages: int) -> None:
        self.layers = [paged.pages(pages, config.groups, config.head_size) for _ in range(config.layers)]
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


class PackedTable(nn.Module):
    """The token table: embeddings, and logits of a few rows."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.packed.rows(tokens)
        return found

    def logits(self, x: Tensor) -> Tensor:
        return self.packed(x)


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


class Network:
    """A model with its cache."""

    def __init__(self, model: Model, config: ModelConfig, cache: Cache) -> None:
        self.model, self.config, self.cache = model, config, cache

    @property
    def is_glm(self) -> bool:
        return self.config.kind == "glm"

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Compute the new tokens of a batch; return the logits of the wanted ones, (wanted, vocab) in fp32."""
        model = self.model
        self.cache.step = step
        if isinstance(model, GLM):
            x, sight = model._embedded(step.ids[None], step.positions[None]), Sight()
        else:
            x = model._embedded(step.ids[None], step.positions)
            # One length for all texts: dynamic scaling would otherwise depend on the batch.
            rotated = turns(step.positions, self.config, self.config.sequence) if self.config.rotary else None
            sight = Sight(None, rotated)
        for block in model.blocks.values():
            x = block(x, sight)
        head = model.tokens if isinstance(model, GLM) else model.head
        logits: Tensor = head.logits(model.norm(x[0, step.wanted]))
        return logits


def empty_model(config: ModelConfig) -> Model:
    """Return a model whose parameters have shapes and no memory."""
    with torch.device("meta"):
        # For a single row, torch's own kernels cost less to call than those that are registered for training.
        ops = native.choose("cpu", REFERENCE)
        model: Model = (GLM if config.kind == "glm" else GPT)(config, ops)
    return model.eval()


def network(
    config: ModelConfig, read: Callable[[str], Tensor], kind: str, pages: int, kernel: bool | None = None
) -> Network:
    """Return the network of a model; `read` returns one whole parameter by its name, in fp32.

    kernel: whether to use the compiled kernels; None: if they are present.
    """
    packs = not library.why_not() if kernel is None else kernel
    model, cache = empty_model(config), Cache(config, pages)
    for path, module in list(model.named_modules()):
        if isinstance(module, (ColumnLinear, RowLinear)):
            bias = read(f"{path}.bias") if module.bias is not None else None
            _exchange(model, path, PackedLinear(Packed.of(read(f"{path}.weight"), bias, kind, packs)))
        elif isinstance(module, TokenTable):
            _exchange(model, path, PackedTable(Packed.of(read(f"{path}.weight"), None, kind, packs)))
        else:
            for name, _ in list(module.named_parameters(recurse=False)):
                value = nn.Parameter(read(f"{path}.{name}"), requires_grad=False)
                setattr(module, name, value)
    for layer, block in enumerate(model.blocks.values()):
        own = block.attention
        assert isinstance(own, Attention)
        block.attention = CachedAttention(own, cache, layer)
    return Network(model, config, cache)


def of_model(model: Model, pages: int, kind: str = "fp32", kernel: bool | None = None) -> Network:
    """Return the network of a model in memory, which is left as it is."""
    state = dict(model.named_parameters())
    vocab = model.config.vocab

    def read(name: str) -> Tensor:
        whole = state[name].detach().float()
        return (whole[:vocab] if name in ("tokens.weight", "output.weight") else whole).clone()

    return network(model.config, read, kind, pages, kernel)


def _exchange(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def spans_of(
    tables: Sequence[Sequence[int]], parts: Sequence[tuple[int, int]], source: Sequence[int], window: int = 0
) -> Spans:
    """Return the spans of new tokens: of each sequence its pages, the positions [begin, end) that are new, and the
    length of a beginning whose tokens all see each other (0: a token sees those before it).

    window: the tokens that a token sees, itself included; 0: all.
    """
    begins, last, slots, first = [0], list[int](), list[int](), list[int]()
    for table, (begin, end), seen in zip(tables, parts, source, strict=True):
        begins.append(begins[-1] + end - begin)
        last += range(begin + 1, end + 1) if not seen else (max(at + 1, seen) for at in range(begin, end))
        first += (max(0, at + 1 - window) if window else 0 for at in range(begin, end))
        slots += (table[at // PAGE] * PAGE + at % PAGE for at in range(begin, end))
    width = max(map(len, tables))
    rows = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
    return Spans(
        rows,
        torch.tensor(begins, dtype=torch.int32),
        torch.tensor(first, dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int64),
        max(last),
    )
