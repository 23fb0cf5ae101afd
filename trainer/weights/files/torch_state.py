"""The state of torch's AdamW and of optimizers like it, which know their parameters by number alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.part import MOMENTS
from trainer.weights.files.torch_read import attributes
from trainer.weights.lazy import Lazy, Shape


@dataclass(frozen=True)
class Numbered:
    """The averages of an optimizer under the names of the model."""

    groups: Sequence[Sequence[str]]
    """The names of each group's parameters, in its order."""
    moments: Mapping[str, Mapping[str, Lazy]]
    steps: int


def by_name(shapes: Mapping[str, Shape], optimizer: Mapping[str, Any], every: bool = True) -> Numbered | None:
    """Return an optimizer's averages under the names of parameters, which are in the order of the model.

    A group of matrices has those of the model in its order, a group of vectors likewise, and one of both has all. A
    parameter that never had a gradient has no averages. None: it has no state, or its shapes do not fit these
    parameters; with `every`, all of them.
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
                # The order is another one: no state is better than one of other parameters.
                return None
            for moment in MOMENTS if entry else ():
                moments[moment][name] = entry[moment]
        named.append(names)
    return None if left and every else Numbered(named, moments, steps_of(optimizer))


def _is_whole(entry: Mapping[str, Any]) -> bool:
    return all(isinstance(entry.get(moment), Lazy) for moment in MOMENTS)


def steps_of(optimizer: Mapping[str, Any]) -> int:
    """Return the steps that an optimizer took: recorded with each parameter, or with each group; 0 if nowhere."""
    return max(_recorded(optimizer), default=0)


def _recorded(optimizer: Mapping[str, Any]) -> Iterator[int]:
    states, groups = attributes(optimizer.get("state")), optimizer.get("param_groups")
    entries = [attributes(entry) for entry in states.values()]
    entries += [attributes(group) for group in (groups if isinstance(groups, list) else ())]
    for entry in entries:
        step = entry.get("step")
        if isinstance(step, Lazy):
            yield int(step.whole().view(-1)[0])
        elif isinstance(step, (int, float)):
            yield int(step)
