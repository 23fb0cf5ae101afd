"""Low-rank adapters (LoRA), added to the matrices of a model whose own weights are frozen.

An adapter adds scale x B A x to the result of a matrix, or of one section of it. It is divided among the tensor
parallel ranks like its matrix: if the matrix is divided by outputs, B is divided and A is whole; if by inputs, A is
divided and B is whole. Each expert has its own adapters, on the rank that has the expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from native import products
from trainer.config.lora import LoraConfig, adapted, sections_of
from trainer.config.model import ModelConfig
from trainer.model.cuts import Cut, cuts_of
from trainer.model.experts import ExpertLinear
from trainer.model.layers import generator_of
from trainer.model.linear import Activate, ColumnLinear, RowLinear, Source
from trainer.parallel.tensor import Parallel, column_linear

# Part of the names of an adapter's matrices.
MARK = ".adapter."


class Adapter(nn.Module):
    """The two matrices of one adapter."""

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...], cuts: dict[str, Cut], first: int) -> None:
        """`a`, `b`: shapes on this rank; `first`: where its section begins in this rank's result."""
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(a)), nn.Parameter(torch.zeros(b))
        self.cuts, self.first = cuts, first


class Adapters(nn.ModuleDict):
    """The adapters of one matrix, one for each adapted section."""

    def __init__(
        self, found: dict[str, Adapter], lora: LoraConfig, parallel: Parallel, by_rows: bool
    ) -> None:
        super().__init__(found)
        self.scale, self.dropout, self.parallel, self.by_rows = lora.scale, lora.dropout, parallel, by_rows

    def each(self) -> list[Adapter]:
        return [adapter for adapter in self.values() if isinstance(adapter, Adapter)]

    def one_type(self, x: Tensor, weight: Tensor) -> torch.dtype | None:
        """Return the type in which one op can compute the matrix and its adapters.

        Return None if there is none: with several ranks, or where autocast would cast a matrix.
        """
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        types = {
            weight.dtype,
            *(matrix.dtype for adapter in self.each() for matrix in (adapter.a, adapter.b)),
        }
        return dtype if self.parallel.size == 1 and types == {dtype} else None

    def added(self, x: Tensor, result: Tensor) -> Tensor:
        """Return the matrix's `result` plus the results of the adapters; `x` is the input of the matrix."""
        x = F.dropout(x, self.dropout, self.training)
        for adapter in self.each():
            low = products.linear(x, adapter.a)
            if self.by_rows:
                more = products.linear(self.parallel.leave(low), adapter.b)
            else:
                more = column_linear(low, adapter.b, None, self.parallel)
            rest = result.shape[-1] - adapter.first - more.shape[-1]
            result = result + F.pad(more * self.scale, (adapter.first, rest))
        return result


class AdaptedColumns(ColumnLinear):
    """A matrix divided by outputs, with adapters."""

    adapter: Adapters

    def forward(self, x: Tensor, source: Source | None = None) -> Tensor:
        dtype = self.adapter.one_type(x, self.weight)
        if dtype is not None:
            return _at_once(x.to(dtype), self.weight, self.bias, self.adapter)
        return self.adapter.added(x, super().forward(x))


class AdaptedRows(RowLinear):
    """A matrix divided by inputs, with adapters."""

    adapter: Adapters

    def forward(self, x: Tensor, activation: Activate | None = None) -> Tensor:
        x = x if activation is None else activation(x)
        dtype = self.adapter.one_type(x, self.weight)
        if dtype is not None:
            return _at_once(x.to(dtype), self.weight, self.bias, self.adapter)
        return self.adapter.added(x, super().forward(x))


class AdaptedExperts(ExpertLinear):
    """One matrix of each expert, with adapters."""

    adapter: Adapters

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        result, adapters = super().forward(rows, counts), self.adapter
        kept = F.dropout(rows, adapters.dropout, self.training)
        for adapter in adapters.each():
            low = self.ops.grouped_linear(kept, adapter.a, counts)
            more = self.ops.grouped_linear(low * adapters.scale, adapter.b, counts)
            rest = result.shape[-1] - adapter.first - more.shape[-1]
            result = result + F.pad(more, (adapter.first, rest))
        return result


def _at_once(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> Tensor:
    found = adapters.each()
    pairs = [matrix for adapter in found for matrix in (adapter.a, adapter.b)]
    first = [adapter.first for adapter in found]
    drops = adapters.dropout > 0 and adapters.training
    kept = F.dropout(x, adapters.dropout) if drops else None
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = _AtOnce.apply(x, kept, weight, bias, adapters.scale, first, *pairs)  # type: ignore[no-untyped-call]
    return result


class _AtOnce(torch.autograd.Function):
    """One op for a matrix and its adapters; the adapters' results are never stored as tensors of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kept: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        first: Sequence[int],
        *pairs: Tensor,
    ) -> Tensor:
        """`kept`: `x` after dropout, for the adapters; None: no dropout."""
        result = products.linear(x.flatten(0, -2), weight, bias)  # (tokens, outputs)
        given = (x if kept is None else kept).flatten(0, -2)
        lows = []
        for start, a, b in zip(first, pairs[::2], pairs[1::2], strict=True):
            low = products.mm(given, a.t())
            products.addmm_(result[:, start : start + len(b)], low, b.t(), scale)
            lows.append(low)
        ctx.save_for_backward(given, weight, *pairs, *lows)
        ctx.scale, ctx.first, ctx.shape = scale, first, x.shape
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        given, weight, *rest = ctx.saved_tensors
        count = len(ctx.first)
        pairs, lows = rest[: 2 * count], rest[2 * count :]
        slope = upstream.flatten(0, -2)
        of_input = products.mm(slope, weight) if ctx.needs_input_grad[0] else None
        of_kept = torch.zeros_like(given) if ctx.needs_input_grad[1] else None
        of_given = of_input if of_kept is None else of_kept
        of_pairs: list[Tensor] = []
        for start, a, b, low in zip(ctx.first, pairs[::2], pairs[1::2], lows, strict=True):
            own = slope[:, start : start + len(b)]
            # These operands are half a row or more apart in memory; with few columns, torch's products of the
            # transposed matrices take half the time.
            of_low = products.mm(b.t(), own.t()).t().mul_(ctx.scale)
            of_b = products.mm(low.t(), own).t().mul_(ctx.scale)
            of_pairs += [products.mm(of_low.t(), given), of_b.contiguous()]
            if of_given is not None:
                products.addmm_(of_given, of_low, a)
        of_input, of_kept = (None if each is None else each.view(ctx.shape) for each in (of_input, of_kept))
        return of_input, of_kept, None, None, None, None, *of_pairs


def adapt(model: Any, config: ModelConfig, lora: LoraConfig, seed: int | None) -> None:
    """Add adapters to a model and freeze its own weights. The adapters start equal in every layout.

    A is drawn as PEFT draws it and B is 0, so the adapted model at first computes what the model does. If the seed is
    None, A is 0 until it is drawn or loaded.
    """
    model.requires_grad_(False)
    for block in model.blocks.values():
        for path, chosen in adapted(config, lora).items():
            module = block.get_submodule(path)
            by_rows = isinstance(module, RowLinear)
            module.adapter = Adapters(
                _made(module, config, lora, path, chosen), lora, model.parallel, by_rows
            )
            if isinstance(module, ExpertLinear):
                module.__class__ = AdaptedExperts
            else:
                module.__class__ = AdaptedRows if by_rows else AdaptedColumns
    if seed is not None:
        _draw(model, seed)


def _made(
    module: ColumnLinear | RowLinear | ExpertLinear,
    config: ModelConfig,
    lora: LoraConfig,
    path: str,
    chosen: Sequence[str],
) -> dict[str, Adapter]:
    if isinstance(module, ExpertLinear):
        return _made_for_experts(module, config, lora, path, chosen)
    outputs, inputs = module.weight.shape
    if isinstance(module, RowLinear):
        cuts = {"a": Cut(1), "b": Cut(partial=True)}
        return {"all": Adapter((lora.rank, inputs), (outputs, lora.rank), cuts, 0)}
    sections, size, found, first = sections_of(config, path), module.parallel.size, {}, 0
    for name, width in sections.items():
        if name in chosen:
            cuts = {"a": Cut(partial=True), "b": Cut(0)}
            found[name] = Adapter((lora.rank, inputs), (width // size, lora.rank), cuts, first)
        first += width // size
    if "all" in chosen:
        cuts = {"a": Cut(partial=True), "b": Cut(0, tuple(sections.values()))}
        found["all"] = Adapter((lora.rank, inputs), (outputs, lora.rank), cuts, 0)
    return found


def _made_for_experts(
    module: ExpertLinear, config: ModelConfig, lora: LoraConfig, path: str, chosen: Sequence[str]
) -> dict[str, Adapter]:
    experts, outputs, inputs = module.weight.shape
    sections = sections_of(config, path)
    first = dict(zip(sections, accumulate(sections.values(), initial=0), strict=False))
    cuts = {"a": Cut(0), "b": Cut(0)}
    return {
        name: Adapter(
            (experts, lora.rank, inputs),
            (experts, sections.get(name, outputs), lora.rank),
            cuts,
            first.get(name, 0),
        )
        for name in chosen
    }


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    cuts = cuts_of(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not name.endswith(".a") or parameter.is_meta:
            continue
        whole = drawn_adapter(name, cuts[name].whole_shape(parameter.shape, model.parallel.size), seed)
        parameter.copy_(cuts[name].take(whole, parameter.shape[0], model.parallel))


def drawn_adapter(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the initial values of a whole matrix A, drawn as PEFT draws them."""
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator_of(seed, name))
