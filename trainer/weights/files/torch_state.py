"""The state of torch's AdamW and similar optimizers, which identify their parameters only by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.part import MOMENTS
from trainer.errors import CheckpointError
from trainer.weights.files.torch_read import attributes
from trainer.weights.lazy import Lazy, Shape

DEEPEST = 12
"""The most levels of dicts in a state dict."""


@dataclass(frozen=True)
class Numbered:
    """An optimizer's averages under the model's names."""

    groups: Sequence[Sequence[str]]
    """The names of each group's parameters, in the group's order."""
    moments: Mapping[str, Mapping[str, Lazy]]
    steps: int


def by_name(shapes: Mapping[str, Shape], optimizer: Mapping[str, Any], every: bool = True) -> Numbered | None:
    """Return an optimizer's averages by parameter name; None if it has no state or its shapes do not fit.

    The parameters are in the order of the model. A group has the model's matrices, its vectors, or all parameters, in
    this order. A parameter that never had a gradient has no averages. `every`: the optimizer must have all parameters.
    """
    groups, states = optimizer.get("param_groups"), attributes(optimizer.get("state"))
    if not isinstance(groups, list) or not states:
        return None
    moments: dict[str, dict[str, Lazy]] = {moment: {} for moment in MOMENTS}
    left, named = list(shapes), list[list[str]]()
    for group in map(attributes, groups):
        own = [attributes(states.get(number)) for number in group.get("params", ())]
        kinds = {len(entry[MOMENTS[0]].shape) > 1 for entry in own if _is_whole(entry)}
        names = [name for name in left if (len(shapes[name]) > 1) in kinds][: len(own)]
        if len(names) < len(own) or any(entry and not _is_whole(entry) for entry in own):
            return None
        for name, entry in zip(names, own, strict=True):
            left.remove(name)
            if entry and entry[MOMENTS[0]].shape != shapes[name]:
                # The order is different: no state is better than another parameter's state.
                return None
            for moment in MOMENTS if entry else ():
                moments[moment][name] = entry[moment]
        named.append(names)
    return None if left and every else Numbered(named, moments, steps_of(optimizer))


def masters_of(
    groups: Sequence[Sequence[str]], held: object, weights: Mapping[str, Lazy]
) -> dict[str, Lazy] | None:
    """Return the fp32 copies of 16-bit parameters by name; None if they are not copies of the weights.

    Each group has the copies of its parameters, in its order.
    """
    found: dict[str, Lazy] = {}
    for group, masters in zip(groups, held if isinstance(held, list) else (), strict=False):
        narrow = [name for name in group if weights[name].dtype != torch.float32]
        if not isinstance(masters, list) or len(masters) != len(narrow):
            return None
        for name, master in zip(narrow, masters, strict=True):
            if not isinstance(master, Lazy) or not is_same(master, weights[name]):
                return None
            found[name] = master
    return found


def is_same(master: Lazy, weight: Lazy) -> bool:
    """Return whether an fp32 copy equals a weight in its first and last row."""
    if master.shape != weight.shape:
        return False
    rows = [(0, 1), (weight.rows - 1, weight.rows)]
    return all(torch.equal(master.read(*row).to(weight.dtype), weight.read(*row)) for row in rows)


def _is_whole(entry: Mapping[str, Any]) -> bool:
    return all(isinstance(entry.get(moment), Lazy) for moment in MOMENTS)


def steps_of(optimizer: Mapping[str, Any]) -> int:
    """Return how many steps an optimizer took, as recorded with a parameter or a group; 0 if not recorded."""
    return max(_recorded(optimizer), default=0)


def _recorded(optimizer: Mapping[str, Any]) -> Iterator[int]:
    states, groups = attributes(optimizer.get("state")), optimizer.get("param_groups")
    entries = [attributes(entry) for entry in states.values()]
    # Megatron-core records one number for all parameters.
    entries.append({"step": states.get("common_step")})
    entries += [attributes(group) for group in (groups if isinstance(groups, list) else ())]
    for entry in entries:
        step = entry.get("step")
        if isinstance(step, Lazy):
            yield number_of(step)
        elif isinstance(step, (int, float)):
            yield int(step)


def number_of(value: Lazy | float) -> int:
    """Return a whole number that a program saved as a number or as a tensor."""
    return int(value.whole().view(-1)[0] if isinstance(value, Lazy) else value)


def flat(document: object, folder: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Lazy]]:
    """Yield every tensor in nested dicts with its keys, joined by dots."""
    if depth > DEEPEST:
        raise CheckpointError(f"{folder}: its dicts contain each other")
    if not isinstance(document, dict):
        raise CheckpointError(f"{folder}: the state of the model is not a dict of tensors")
    for key, value in document.items():
        if isinstance(value, Lazy):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from flat(value, folder, f"{prefix}{key}.", depth + 1)
