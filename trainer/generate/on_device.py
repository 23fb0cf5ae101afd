"""A model on a CUDA device or an NPU: matrices of one type, and a paged cache in device memory.

The cache has the type of the weights. The residual stream, norms and logits are in fp32. Kinds of devices differ only
in the ops of `native`: attention of a prompt, attention of new tokens over the pages, norms and activations. The host
decides what is computed and samples the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import native
from native.decode.matrix import TYPES, Matrix
from native.decode.paged import PAGE, Spans
from native.paging import Reach
from trainer.config.attention import Heads
from trainer.device import Device
from trainer.engine.passes import Model
from trainer.generate import modules
from trainer.generate.modules import PagedCache, Step, exchange
from trainer.model.experts import ExpertLinear, Experts
from trainer.model.layers import TokenTable
from trainer.model.linear import ColumnLinear, RowLinear
from trainer.parallel.tensor import ALONE, Parallel

Read = Callable[[str], Tensor]
# How many places a batch of prompts may have per token.
PADDED = 1.25


class NarrowExperts(nn.Module):
    """Experts with all matrices in one type; inputs are converted to that type. The router stays in fp32."""

    def __init__(self, own: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self.own, self.dtype = own, dtype

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.own(x.to(self.dtype))
        return mixed


def fill(model: Model, read: Read, kind: str, device: Device, parallel: Parallel = ALONE) -> None:
    """Move a model whose parameters have no memory to a device, one parameter at a time.

    read: returns one whole parameter by name, in fp32, in CPU memory. kind: the type of matrices.
    """
    dtype = TYPES[kind]

    def moved(module: nn.Module, own: Tensor) -> Tensor:
        return own.to(dtype if isinstance(module, ExpertLinear) else torch.float32).to(device.name)

    # The product with the table is faster with rows in multiples of 64.
    modules.fill(model, read, partial(Matrix.of, dtype=dtype, device=device.name), parallel, 64, moved)
    for path, module in list(model.named_modules()):
        if isinstance(module, Experts):
            exchange(model, path, NarrowExperts(module, dtype))


def weight_bytes(model: Model, kind: str) -> int:
    """Return the bytes of a model's parameters on a device with matrices of type `kind`."""
    total = 0
    for module in model.modules():
        narrow = isinstance(module, (ColumnLinear, RowLinear, TokenTable, ExpertLinear))
        each = TYPES[kind].itemsize if narrow else 4
        total += sum(each * parameter.numel() for parameter in module.parameters(recurse=False))
    return total


@dataclass(frozen=True)
class _Stretch:
    """New tokens [begin, end) of one text, and the cache slots of the keys that they attend to."""

    begin: int
    end: int
    slots: Tensor
    mask: native.Mask


@dataclass(frozen=True)
class _Prompts:
    """Prompts from their first token on, of similar lengths, which one call computes; the shorter ones are padded."""

    tokens: Tensor
    """(texts, length): the token at each place of the batch; after a text's end, its last token."""
    rows: Tensor
    """The tokens of all texts."""
    places: Tensor
    """Where in the flattened batch each of them is."""
    window: int


def _is_whole(spans: Spans, begin: int, end: int) -> bool:
    """Return whether new tokens are a text from its first one on, in which each sees the tokens before it."""
    return int(spans.last[begin]) == 1 and int(spans.last[end - 1]) == end - begin


def _alike(rows: Sequence[int], begins: Sequence[int]) -> list[list[int]]:
    """Divide texts into batches in which at most a fifth of the places are padding."""
    batches: list[list[int]] = []
    tokens = longest = 0
    for row in sorted(rows, key=lambda row: begins[row] - begins[row + 1]):
        length = begins[row + 1] - begins[row]
        if not batches or longest * (len(batches[-1]) + 1) > (tokens + length) * PADDED:
            batches.append([])
            tokens, longest = 0, length
        batches[-1].append(row)
        tokens += length
    return batches


class DeviceCache(PagedCache):
    """Pages on a device: (pages, 16, groups, head size)."""

    def __init__(
        self,
        heads: Heads,
        pages: int,
        layers: int,
        kind: str,
        device: Device,
        ops: native.Choice,
    ) -> None:
        """`heads`: those of this rank."""
        # One more page takes what the unused texts of a captured step store.
        self.scratch = pages
        shape = (pages + 1, PAGE, heads.groups, heads.size)
        self.device, self.window, self.ops = device.name, heads.window, ops
        self.layers = [
            (self._empty(shape, TYPES[kind]), self._empty(shape, TYPES[kind])) for _ in range(layers)
        ]
        self._slots = torch.empty(0)
        self._reach: Reach | None = None
        self._stretches: list[_Stretch] = []
        self._prompts: list[_Prompts] = []

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def begin(self, step: Step) -> Step:
        spans = step.spans
        self._slots = spans.slots.to(self.device)
        begins = spans.begins.tolist()
        # Texts with one new token come first; prompts follow.
        alone = next((row for row, (at, end) in enumerate(pairwise(begins)) if end - at > 1), len(begins) - 1)
        self._reach = self._reach_of(spans, alone) if alone else None
        rows = range(alone, len(begins) - 1)
        whole = [row for row in rows if _is_whole(spans, begins[row], begins[row + 1])]
        self._prompts = [
            self._prompts_of([(begins[row], begins[row + 1]) for row in batch])
            for batch in _alike(whole, begins)
        ]
        self._stretches = [
            self._stretch_of(spans, row, begins[row], begins[row + 1])
            for row in rows
            if row not in set(whole)
        ]
        ids, positions, wanted = (part.to(self.device) for part in (step.ids, step.positions, step.wanted))
        return Step(ids, positions, spans, wanted)

    def use(self, slots: Tensor, reach: Reach) -> None:
        """Let later calls of `attend` be for a step with one new token per text."""
        self._slots, self._reach, self._stretches, self._prompts = slots, reach, [], []

    def _reach_of(self, spans: Spans, texts: int) -> Reach:
        first, last = spans.first[:texts], spans.last[:texts]
        lengths = tuple(last.tolist())
        tables = spans.tables[:texts, : -(-max(lengths) // PAGE)].contiguous()
        from_start = not bool(first.any())
        tables, first, last = (part.to(self.device) for part in (tables, first, last))
        return Reach(tables, first, last, lengths, from_start)

    def _prompts_of(self, ranges: Sequence[tuple[int, int]]) -> _Prompts:
        longest = max(end - begin for begin, end in ranges)
        tokens = torch.stack(
            [torch.arange(begin, begin + longest).clamp(max=end - 1) for begin, end in ranges]
        )
        rows = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        places = torch.cat([torch.arange(end - begin) + i * longest for i, (begin, end) in enumerate(ranges)])
        window = self.window if 0 < self.window < longest else 0
        tokens, rows, places = (part.to(self.device) for part in (tokens, rows, places))
        return _Prompts(tokens, rows, places, window)

    def _stretch_of(self, spans: Spans, row: int, begin: int, end: int) -> _Stretch:
        first, last = int(spans.first[begin]), int(spans.last[end - 1])
        start = first // PAGE
        pages = spans.tables[row, start : -(-last // PAGE)].long()
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[: last - start * PAGE]
        # A GLM's source is computed in one step; all its tokens attend to the whole source.
        seen = int(spans.last[begin])
        is_causal = last - seen == end - begin - 1
        source = None if is_causal else torch.tensor([seen - start * PAGE], device=self.device)
        window = self.window if int(spans.first[end - 1]) else 0
        return _Stretch(begin, end, slots.to(self.device), native.Mask(window, source=source))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = self.layers[layer]
        self.ops.store_in_pages(*pages, k, v, self._slots)
        alone = 0 if self._reach is None else len(self._reach.tables)
        if self._reach is not None:
            mixed = self.ops.paged_attention(q[:alone], *pages, self._reach)
            if alone == len(q):
                return mixed
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self._reach is not None:
            out[:alone] = mixed
        for prompts in self._prompts:
            queries, keys, values = (part[prompts.tokens].transpose(1, 2) for part in (q, k, v))
            mixed = self.ops.attention(queries, keys, values, causal=True, mask=native.Mask(prompts.window))
            out[prompts.rows] = mixed.transpose(1, 2).flatten(0, 1)[prompts.places]
        for stretch in self._stretches:
            keys, values = (own.flatten(0, 1)[stretch.slots].transpose(0, 1)[None] for own in pages)
            queries = q[stretch.begin : stretch.end].transpose(0, 1)[None]
            mixed = self.ops.attention(queries, keys, values, causal=True, mask=stretch.mask)
            out[stretch.begin : stretch.end] = mixed[0].transpose(0, 1)
        return out
