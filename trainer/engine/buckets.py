"""Parameters side by side in flat memory, in buckets that ranks exchange as a whole and divide into equal shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.passes import Model
from trainer.parallel.group import Group
from trainer.parallel.pipeline import TIED

# The bytes of gradients after which a bucket is full (DDP's default).
BUCKET_BYTES = 25 << 20
# Parameters and shares begin at multiples of so many numbers, as vector instructions and links want.
ALIGNMENT = 64


@dataclass(frozen=True)
class Bucket:
    """Parameters of one type that are exchanged together."""

    names: Sequence[str]
    start: int
    """The place of its first number in the memory of all buckets."""
    size: int
    """How many numbers it has: the shares of all ranks, which are equally large."""

    def of(self, flat: Tensor) -> Tensor:
        """Return this bucket's part of the memory of all buckets."""
        return flat[self.start : self.start + self.size]


class Buckets:
    """The places of parameters in the buckets, and what this rank owns of each; equal in every process of a layout."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], rank: int, world: int, types: Mapping[str, torch.dtype]
    ) -> None:
        """`types`: those that the parameters will have."""
        self.all: list[Bucket] = []
        self.own: dict[str, slice] = {}
        """The numbers of each flattened parameter that are in this rank's shares."""
        self.size = 0
        self._parameters = parameters
        self._starts: dict[str, int] = {}
        for names in _grouped(parameters, types):
            ends = self.size
            for name in names:
                self._starts[name] = ends
                ends += _aligned(parameters[name].numel())
            share = _aligned(-(-(ends - self.size) // world))
            first = self.size + rank * share
            for name in names:
                begin, end = (
                    min(max(at - self._starts[name], 0), parameters[name].numel())
                    for at in (first, first + share)
                )
                self.own[name] = slice(begin, end)
            self.all.append(Bucket(names, self.size, share * world))
            self.size += share * world

    def view(self, name: str, flat: Tensor, start: int = 0) -> Tensor:
        """Return one parameter's part of the memory of all buckets, or of that from number `start` on."""
        parameter, at = self._parameters[name], self._starts[name] - start
        return flat[at : at + parameter.numel()].view_as(parameter)

    def shares(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's numbers of tensors with the parameters' shapes, as views, where it has any."""
        return {
            name: each.detach().view(-1)[self.own[name]]
            for name, each in whole.items()
            if self.own[name].start < self.own[name].stop
        }


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


def _grouped(
    parameters: Mapping[str, nn.Parameter], types: Mapping[str, torch.dtype]
) -> Iterable[Sequence[str]]:
    """Return the names of each bucket, in about the order in which a backward pass completes them.

    The tied token table has its own bucket, because both ends of a pipeline sum their shares of it.
    """
    ordered = list(parameters)[::-1]
    groups: list[list[str]] = []
    filling: dict[tuple[torch.dtype, bool], list[str]] = {}
    for name in ordered:
        names = filling.setdefault((types[name], name == TIED), [])
        if not names:
            groups.append(names)
        names.append(name)
        if 4 * sum(parameters[each].numel() for each in names) >= BUCKET_BYTES:
            filling.pop((types[name], name == TIED))
    places = {name: place for place, name in enumerate(ordered)}
    return sorted(groups, key=lambda names: places[names[-1]])


class GatheredWeights:
    """The weights of ZeRO 1: each rank updates its shares, and the others' arrive while the next pass begins.

    Hooks of the embeddings, the blocks and the last norm wait for the weights that come next.
    """

    def __init__(
        self,
        model: Model,
        parameters: Mapping[str, nn.Parameter],
        buckets: Buckets,
        group: Group,
        types: Mapping[str, torch.dtype],
    ) -> None:
        """Move the parameters into buckets of their types."""
        self.group = group
        self.flats: list[Tensor] = []
        # What is on its way, by the number of its bucket.
        self.coming: dict[int, Sequence[Any]] = {}
        used = {}
        for index, bucket in enumerate(buckets.all):
            flat = torch.zeros(bucket.size, dtype=types[bucket.names[0]], device=group.device.name)
            for name in bucket.names:
                place = buckets.view(name, flat, bucket.start)
                place.copy_(parameters[name].data)
                parameters[name].data = place
                used[parameters[name]] = index
            self.flats.append(flat)
        ends = [child for name, child in model.named_children() if name not in ("blocks", "norm")]
        for module in (*ends, *model.blocks.values()):
            needed = {used[parameter] for parameter in module.parameters() if parameter in used}
            module.register_forward_pre_hook(partial(self.wait, sorted(needed, reverse=True)))
        if hasattr(model, "norm"):
            # The output matrix follows, which may be the token table of another stage.
            model.norm.register_forward_pre_hook(partial(self.wait, None))

    def send(self) -> None:
        """Start to send this rank's shares to the others, first those that a forward pass uses first."""
        for index in reversed(range(len(self.flats))):
            self.coming[index] = self.group.gather_shares(self.flats[index])

    def wait(self, indices: Iterable[int] | None = None, *_: object) -> None:
        """Wait for all weights, or for those of some buckets; hooks also pass the module and its input."""
        for index in list(self.coming) if indices is None else indices:
            for work in self.coming.pop(index, ()):
                work.wait()
