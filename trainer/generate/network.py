"""The network that computes new tokens over a paged cache, with weights packed in fp32, bf16 or 8 bits.

The new tokens of all texts form one row. With the compiled library a step is one call (see fused.py). Without it, with
experts, and on a device, the model's own modules run as in training, but with other matrices and with attention over
the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import native
from native.compiled import library
from native.decode.packed import Packed
from native.decode.paged import PAGE, Spans
from native.registry import REFERENCE
from trainer.config.attention import Heads
from trainer.config.layout import pieces_of
from trainer.config.model import ModelConfig
from trainer.device import Device
from trainer.engine.passes import Model
from trainer.generate.fused import Fused, inputs_of, is_compiled
from trainer.generate.modules import Cache, PackedTable, PagedCache, Step, fill
from trainer.generate.on_device import DeviceCache
from trainer.generate.on_device import fill as fill_device
from trainer.model.attention.heads import CachedAttention
from trainer.model.attention.latent import CachedLatents, LatentAttention
from trainer.model.attention.sight import Sight
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.model.rotary import Turns, sight_of
from trainer.parallel.pipeline import UNDIVIDED, Pipeline
from trainer.parallel.tensor import ALONE, Parallel


@dataclass(frozen=True)
class Place:
    """This rank's position in the layout of the model; by default it has the whole model."""

    tensor: Parallel = ALONE
    pipeline: Pipeline = UNDIVIDED


WHOLE_MODEL = Place()


class Network:
    """A model, or this rank's part of it, with its cache."""

    draws = False
    """Whether logits stay on a device, where tokens are drawn."""
    prompt_tokens = (256, 1024)
    """The most prompt tokens in a step: with running texts, which wait for the whole step, and without."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        cache: PagedCache,
        fused: Fused | None,
        place: Place = WHOLE_MODEL,
        kind: str = "fp32",
    ) -> None:
        """`kind`: the type of the matrices."""
        self.model, self.config, self.cache, self.fused, self.place = model, config, cache, fused, place
        self.kind = kind

    @property
    def is_glm(self) -> bool:
        return self.config.kind == "glm"

    @property
    def window(self) -> int:
        """Return how many tokens a token sees in every layer; 0: all, or layers differ and the cache knows."""
        return 0 if self.config.windowed else self.config.window

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Compute the new tokens of a batch; return the logits of the wanted tokens, (wanted, vocab) in fp32.

        They are in CPU memory, and valid until the next step.
        """
        own = self.compute(step)
        assert own is not None
        return own.cpu()

    def copy_page(self, source: int, target: int) -> None:
        """Copy page `source` to page `target` in every layer."""
        self.cache.copy(source, target)

    @torch.inference_mode()
    def compute(self, step: Step) -> Tensor | None:
        """Compute this rank's part of a step; return the logits on ranks of the last stage, else None."""
        step = self.cache.begin(step)
        if self.fused is not None:
            return self._compute_fused(self.fused, step, self._sight(step.positions).turns)
        return self.through(step.ids, step.positions, step.wanted)

    def through(self, ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor | None:
        """Compute this rank's layers by the model's own modules; return as `compute`."""
        pipeline, model = self.place.pipeline, self.model
        x = self._embedded(ids, positions) if pipeline.is_first else self._received(len(ids))
        sight = self._sight(positions)
        for block in model.blocks.values():
            x = block(x, sight)
        if not pipeline.is_last:
            self._send(x)
            return None
        logits: Tensor = self._head.logits(model.norm(x[0, wanted]))
        return logits

    def _sight(self, positions: Tensor) -> Sight:
        """Return what blocks share, with the same length for all texts: dynamic scaling depends on it."""
        return Sight() if self.is_glm else sight_of(self.config, positions)

    def _compute_fused(self, fused: Fused, step: Step, rotated: Turns | None) -> Tensor | None:
        pipeline, tokens = self.place.pipeline, len(step.ids)
        inputs = inputs_of(step.ids, step.positions, step.spans, step.wanted, rotated)
        fused.reserve(tokens)
        x = fused.x.data[:tokens, : self.config.hidden]
        if not pipeline.is_first:
            x.copy_(self._received(tokens)[0])
        elif self.place.tensor.size > 1:
            x.copy_(self._embedded(step.ids, step.positions)[0])
        begin = 0
        for end, buffer in fused.sums:
            fused.run(inputs, begin, end)
            self.place.tensor.sum(buffer.data[:tokens])
            begin = end
        fused.run(inputs, begin)
        if not pipeline.is_last:
            self._send(x.unsqueeze(0))
            return None
        assert fused.logits is not None
        own = fused.logits.data[: len(step.wanted), : self._head.packed.outputs]
        # Valid until the next step.
        return self._head.whole(own)

    @property
    def _head(self) -> PackedTable:
        head: Any = self.model.head
        assert isinstance(head, PackedTable)
        return head

    def _embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the embedded tokens, (1, tokens, hidden)."""
        if isinstance(self.model, GLM):
            return self.model._embedded(ids[None], positions[None])
        return self.model._embedded(ids[None], positions)

    def _received(self, tokens: int) -> Tensor:
        x = torch.empty(1, tokens, self.config.hidden, device=self.cache.device)
        pipeline = self.place.pipeline
        dist.recv(x, pipeline.ranks[pipeline.stage - 1], group=pipeline.group)
        return x

    def _send(self, x: Tensor) -> None:
        pipeline = self.place.pipeline
        dist.send(x.contiguous(), pipeline.ranks[pipeline.stage + 1], group=pipeline.group)


def empty_model(config: ModelConfig, place: Place = WHOLE_MODEL, ops: native.Choice | None = None) -> Model:
    """Return a model, or a rank's part of it, with parameter shapes but no memory; `ops`: None for the CPU's ops."""
    pieces = pieces_of(config.layers, place.pipeline.stage, place.pipeline.stages)
    # For a single row, calling torch's own kernels takes less time than the kernels that are registered for training.
    ops = ops or native.choose("cpu", REFERENCE)
    with torch.device("meta"):
        kind = GLM if config.kind == "glm" else GPT
        model: Model = kind(config, ops, parallel=place.tensor, pieces=pieces)
    return model.eval()


def heads_of(model: Model) -> list[Heads]:
    """Return the heads of this rank in each of its layers."""
    layers, ranks = model.config.each_layer, model.parallel.size
    return [layers[int(layer)].attention.part(ranks) for layer in model.blocks]


def network(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    kind: str,
    pages: int,
    kernel: bool | None = None,
    place: Place = WHOLE_MODEL,
) -> Network:
    """Return the network of a model; `read` returns one whole parameter by name, in fp32.

    kernel: whether to use the compiled kernels; None: if they are present. place: the part that this rank has.
    """
    packs = not library.why_not() if kernel is None else kernel
    model = empty_model(config, place)
    cache = Cache(heads_of(model), pages)
    fill(model, read, partial(Packed.of, kind=kind, native=packs), place.tensor)
    _attend_over(model, cache)
    ends = place.pipeline.is_first, place.pipeline.is_last
    fused = Fused(model, *ends) if packs and is_compiled(config) else None
    return Network(model, config, cache, fused, place, kind)


def device_network(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    kind: str,
    pages: int,
    device: Device,
    place: Place = WHOLE_MODEL,
    ops: native.Choice | None = None,
) -> Network:
    """Return the network of a model on a device, with matrices and pages of type `kind`; `ops`: None for its own."""
    ops = ops or native.choose(device.kind)
    model = empty_model(config, place, ops)
    fill_device(model, read, kind, device, place.tensor)
    cache = DeviceCache(heads_of(model), pages, kind, device, ops)
    _attend_over(model, cache)
    return Network(model, config, cache, None, place, kind)


def _attend_over(model: Model, cache: PagedCache) -> None:
    blocks: Any = model.blocks.values()
    for layer, block in enumerate(blocks):
        latent = isinstance(block.attention, LatentAttention)
        block.attention = (CachedLatents if latent else CachedAttention)(block.attention, cache, layer)


def of_model(model: Model, pages: int, kind: str = "fp32", kernel: bool | None = None) -> Network:
    """Return the network of a model in memory; the model is not changed."""
    return network(model.config, reader_of(model), kind, pages, kernel)


def reader_of(model: Model) -> Callable[[str], Tensor]:
    """Return a function that reads whole parameters of a model in memory."""
    state = dict(model.named_parameters())
    vocab = model.config.vocab

    def read(name: str) -> Tensor:
        whole = state[name].detach().float()
        return (whole[:vocab] if name in ("tokens.weight", "output.weight") else whole).clone()

    return read


def spans_of(
    tables: Sequence[Sequence[int]], parts: Sequence[tuple[int, int]], source: Sequence[int], window: int = 0
) -> Spans:
    """Return the spans of new tokens.

    tables: the pages of each sequence. parts: the new positions [begin, end) of each. source: for each, the length of a
    prefix whose tokens attend to each other; with 0 each token attends to the tokens before it. window: how many tokens
    a token attends to, itself included; 0: all.
    """
    texts = zip(tables, parts, source, strict=True)
    places = [(table, at, seen) for table, part, seen in texts for at in range(*part)]
    begins = [0, *itertools.accumulate(end - begin for begin, end in parts)]
    first = [max(0, at + 1 - window) if window else 0 for _, at, _ in places]
    last = [max(at + 1, seen) for _, at, seen in places]
    slots = [table[at // PAGE] * PAGE + at % PAGE for table, at, _ in places]
    width = max(map(len, tables))
    rows = [[*table, *[0] * (width - len(table))] for table in tables]
    # torch itself takes three times as long to read lists.
    given = [torch.from_numpy(np.array(each, np.int32)) for each in (rows, begins, first, last)]
    return Spans(
        given[0], given[1], given[2], given[3], torch.from_numpy(np.array(slots, np.int64)), max(last)
    )
