"""Adapters of experts in PEFT's form.

In transformers 5 the experts of a layer are one module with two parameters, and PEFT has one pair of matrices for all
experts of a parameter: A contains the rows of one expert after the other, and in B the columns of the experts
alternate. Folders from transformers 4 have a pair for each matrix of each expert; they are read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.lora import module_of, sections_of
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError
from trainer.model.adapter import MARK
from trainer.weights.families.family import Family
from trainer.weights.rules import Rule, rules_of

Pair = tuple[Tensor, Tensor]
"""The matrices A and B; those of experts have a first dimension of experts."""

# transformers' module of a layer's experts, and its parameter for each of our modules.
MODULE = "model.layers.{n}.mlp.experts"
PARAMETERS = {"feed_forward.up": "mlp.experts.gate_up_proj", "feed_forward.down": "mlp.experts.down_proj"}
# PEFT wraps the module once per parameter with an adapter; the first parameter is the innermost.
INSIDE = ".base_layer"


@dataclass(frozen=True)
class Found:
    """An adapter read from a folder, and the names of its modules in the folder."""

    path: str
    section: str
    pair: Pair
    names: tuple[str, ...]


def write_experts(model: ModelConfig, pairs: Mapping[str, Tensor]) -> tuple[dict[str, Pair], dict[str, int]]:
    """Return PEFT's pair for each of its modules, and the rank of each parameter with an adapter."""
    found, ranks = dict[str, Pair](), dict[str, int]()
    for number in range(model.layers if model.experts else 0):
        joined = {}
        for module in PARAMETERS:
            pair = _joined(model, module, f"blocks.{number}.{module}{MARK}", pairs)
            if pair is not None:
                joined[module] = pair
                ranks[PARAMETERS[module]] = pair[0].shape[1]
        for module, (a, b) in joined.items():
            inside = INSIDE if len(joined) == 2 and module == "feed_forward.up" else ""
            flat = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1).contiguous()
            found[MODULE.format(n=number) + inside] = flat
    return found, ranks


def _joined(model: ModelConfig, module: str, prefix: str, pairs: Mapping[str, Tensor]) -> Pair | None:
    """Return one adapter for all sections; if several have one, its rank is the sum and its effect the same."""
    if f"{prefix}all.a" in pairs:
        return pairs[f"{prefix}all.a"], pairs[f"{prefix}all.b"]
    sections = sections_of(model, module)
    chosen = {
        name: (pairs[f"{prefix}{name}.a"], pairs[f"{prefix}{name}.b"])
        for name in sections
        if f"{prefix}{name}.a" in pairs
    }
    return stacked(chosen, sections) if chosen else None


def stacked(found: Mapping[str, Pair], sections: Mapping[str, int]) -> Pair:
    """Return one adapter of a higher rank that adds the same as those of the sections; of experts, for each."""
    a = torch.cat([pair[0] for pair in found.values()], -2)
    b, row, column = torch.zeros(*a.shape[:-2], sum(sections.values()), a.shape[-2]), 0, 0
    for section, width in sections.items():
        if section in found:
            own = found[section][1]
            b[..., row : row + width, column : column + own.shape[-1]] = own
            column += own.shape[-1]
        row += width
    return a, b


def read_experts(
    folder: str, family: Family, model: ModelConfig, theirs: Mapping[str, Mapping[str, Tensor]], rank: int
) -> Iterator[Found]:
    """Yield the adapters of experts in a folder whose other adapters have rank `rank`."""
    for number in range(model.layers):
        name = MODULE.format(n=number)
        outer, inner = theirs.get(name), theirs.get(name + INSIDE)
        if inner is not None and outer is not None:
            yield from _of_parameter(folder, model, number, "feed_forward.up", name + INSIDE, inner, rank)
            yield from _of_parameter(folder, model, number, "feed_forward.down", name, outer, rank)
        elif outer is not None:
            # Only one parameter has an adapter; its number of inputs tells which one.
            a = _both(folder, name, outer)[0]
            module = "feed_forward.down" if a.shape[1] == model.inner else "feed_forward.up"
            if model.inner == model.hidden and outer["B"].shape[0] == model.hidden:
                module = "feed_forward.down"
            yield from _of_parameter(folder, model, number, module, name, outer, rank)
    for rule in rules_of(family.rules, model):
        if rule.experts:
            yield from _of_each(folder, model, rule, theirs)


def _both(folder: str, name: str, found: Mapping[str, Tensor]) -> Pair:
    if set(found) != {"A", "B"}:
        raise CheckpointError(f"{folder}: {name} has only one of lora_A and lora_B")
    return found["A"], found["B"]


def _of_parameter(
    folder: str,
    model: ModelConfig,
    number: int,
    module: str,
    name: str,
    found: Mapping[str, Tensor],
    rank: int,
) -> Iterator[Found]:
    """Yield the adapters of one parameter of a layer: one, or two for an adapter of twice the rank."""
    a, b = _both(folder, name, found)
    experts, path = model.experts, f"blocks.{number}.{module}"
    sections = sections_of(model, module)
    outputs, inputs = sum(sections.values()), model.inner if module.endswith("down") else model.hidden
    own = len(a) // experts
    if (len(a) % experts, a.shape[1], *b.shape) != (0, inputs, outputs, len(a)):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise CheckpointError(
            f"{folder}: the adapter of {name} is {shapes}, which fits no matrix of its experts"
        )
    a, b = a.view(experts, own, inputs), b.reshape(outputs, own, experts).permute(2, 0, 1).contiguous()
    if own == rank:
        yield Found(path, "all", (a, b), (name,))
        return
    halves = list(sections.items())
    (_, width) = halves[0]
    if own != 2 * rank or len(halves) != 2 or b[:, :width, rank:].any() or b[:, width:, :rank].any():
        raise CheckpointError(f"{folder}: {name} has rank {own}: our adapters all have the same rank, {rank}")
    for at, (section, _) in enumerate(halves):
        part = slice(at * rank, (at + 1) * rank)
        rows = b[:, at * width : (at + 1) * width, part].contiguous()
        yield Found(path, section, (a[:, part].contiguous(), rows), (name,))


def _of_each(
    folder: str, model: ModelConfig, rule: Rule, theirs: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[Found]:
    """Yield the adapters of a layer's matrices, if the folder has a pair for each expert."""
    path = rule.ours.removesuffix(".weight")
    sections = list(sections_of(model, module_of(rule.ours)))
    each = len(rule.theirs) // rule.experts
    for at in range(each):
        names = [name.removesuffix(".weight") for name in rule.theirs[at::each]]
        present = [name for name in names if name in theirs]
        if not present:
            continue
        if len(present) != len(names):
            lacking = next(name for name in names if name not in theirs)
            raise CheckpointError(f"{folder}: has the adapter of {present[0]}, but not that of {lacking}")
        pairs = [_both(folder, name, theirs[name]) for name in names]
        section = sections[at] if each > 1 else "all"
        a, b = (torch.stack([pair[part] for pair in pairs]) for part in (0, 1))
        yield Found(path, section, (a, b), tuple(names))
