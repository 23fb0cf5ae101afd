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
from native import reference
from native.decode.matrix import TYPES, Matrix
from native.decode.paged import PAGE, Spans
from native.paging import Reach
from trainer.config.attention import Heads
from trainer.device import Device
from trainer.engine.passes import Model
from trainer.generate import modules
from trainer.generate.modules import PagedCache, Step, exchange, within
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


@dataclass(frozen=True)
class _Plan:
    """What layers with one window compute of a step."""

    reach: Reach | None = None
    """Texts with one new token, which come first."""
    stretches: Sequence[_Stretch] = ()
    prompts: Sequence[_Prompts] = ()


class DeviceCache(PagedCache):
    """Pages on a device: (pages, 16, groups, head size)."""

    def __init__(
        self,
        heads: Sequence[Heads],
        pages: int,
        kind: str,
        device: Device,
        ops: native.Choice,
    ) -> None:
        """`heads`: those of this rank, in each layer."""
        # One more page takes what the unused texts of a captured step store.
        self.scratch = pages
        self.device, self.heads, self.ops = device.name, heads, ops
        self.layers = [self._empty(own, TYPES[kind]) for own in heads]
        self._slots = torch.empty(0)
        self._plans: dict[int, _Plan] = {}

    def _empty(self, heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        groups, size, shared = heads.pages
        shape = (self.scratch + 1, PAGE, groups, size)
        keys = torch.zeros(shape, dtype=dtype, device=self.device)
        return keys, keys[..., :shared] if shared else torch.zeros_like(keys)

    def begin(self, step: Step) -> Step:
        self._slots = step.spans.slots.to(self.device)
        windows = {own.window for own in self.heads}
        self._plans = {window: self._plan(within(step.spans, window), window) for window in windows}
        ids, positions, wanted = (part.to(self.device) for part in (step.ids, step.positions, step.wanted))
        return Step(ids, positions, step.spans, wanted)

    def _plan(self, spans: Spans, window: int) -> _Plan:
        begins = spans.begins.tolist()
        # Texts with one new token come first; prompts follow.
        alone = next((row for row, (at, end) in enumerate(pairwise(begins)) if end - at > 1), len(begins) - 1)
        rows = range(alone, len(begins) - 1)
        whole = [row for row in rows if _is_whole(spans, begins[row], begins[row + 1])]
        prompts = [
            self._prompts_of([(begins[row], begins[row + 1]) for row in batch], window)
            for batch in _alike(whole, begins)
        ]
        stretches = [
            self._stretch_of(spans, row, begins[row], begins[row + 1], window)
            for row in rows
            if row not in set(whole)
        ]
        return _Plan(self._reach_of(spans, alone) if alone else None, stretches, prompts)

    def use(self, slots: Tensor, reach: Reach) -> None:
        """Let later calls of `attend` be for a step with one new token per text."""
        self._slots = slots
        self._plans = {own.window: _Plan(within(reach, own.window)) for own in self.heads}

    def _reach_of(self, spans: Spans, texts: int) -> Reach:
        first, last = spans.first[:texts], spans.last[:texts]
        lengths = tuple(last.tolist())
        tables = spans.tables[:texts, : -(-max(lengths) // PAGE)].contiguous()
        from_start = not bool(first.any())
        tables, first, last = (part.to(self.device) for part in (tables, first, last))
        return Reach(tables, first, last, lengths, from_start)

    def _prompts_of(self, ranges: Sequence[tuple[int, int]], window: int) -> _Prompts:
        longest = max(end - begin for begin, end in ranges)
        tokens = torch.stack(
            [torch.arange(begin, begin + longest).clamp(max=end - 1) for begin, end in ranges]
        )
        rows = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        places = torch.cat([torch.arange(end - begin) + i * longest for i, (begin, end) in enumerate(ranges)])
        window = window if window < longest else 0
        tokens, rows, places = (part.to(self.device) for part in (tokens, rows, places))
        return _Prompts(tokens, rows, places, window)

    def _stretch_of(self, spans: Spans, row: int, begin: int, end: int, window: int) -> _Stretch:
        first, last = int(spans.first[begin]), int(spans.last[end - 1])
        start = first // PAGE
        pages = spans.tables[row, start : -(-last // PAGE)].long()
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[: last - start * PAGE]
        # A GLM's source is computed in one step; all its tokens attend to the whole source.
        seen = int(spans.last[begin])
        is_causal = last - seen == end - begin - 1
        source = None if is_causal else torch.tensor([seen - start * PAGE], device=self.device)
        window = window if int(spans.first[end - 1]) else 0
        return _Stretch(begin, end, slots.to(self.device), native.Mask(window, source=source))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        pages, own = self.layers[layer], self.heads[layer]
        plan, attention, over_pages = self._plans[own.window], self.ops.attention, self.ops.paged_attention
        if own.plain:
            attention, over_pages = (
                partial(each, cap=own.cap, sinks=sinks)
                for each in (reference.attention, reference.paged_attention)
            )
        (reference if own.plain else self.ops).store_in_pages(*pages, k, v, self._slots)
        alone = 0 if plan.reach is None else len(plan.reach.tables)
        if plan.reach is not None:
            mixed = over_pages(q[:alone], *pages, plan.reach)
            if alone == len(q):
                return mixed
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        if plan.reach is not None:
            out[:alone] = mixed
        for prompts in plan.prompts:
            queries, keys, values = (part[prompts.tokens].transpose(1, 2) for part in (q, k, v))
            mixed = attention(queries, keys, values, causal=True, mask=native.Mask(prompts.window))
            out[prompts.rows] = mixed.transpose(1, 2).flatten(0, 1)[prompts.places]
        for stretch in plan.stretches:
            keys, values = (part.flatten(0, 1)[stretch.slots].transpose(0, 1)[None] for part in pages)
            queries = q[stretch.begin : stretch.end].transpose(0, 1)[None]
            mixed = attention(queries, keys, values, causal=True, mask=stretch.mask)
            out[stretch.begin : stretch.end] = mixed[0].transpose(0, 1)
        return out
