"""How each parameter is divided among the tensor parallel ranks.

Parameters under logical names: whole and unpadded in a checkpoint, cut and padded on a rank. Names and whole shapes are
the same in every layout, so what one layout saved any other loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.tensor import Parallel


@dataclass(frozen=True)
class Cut:
    """How one parameter is divided among the tensor parallel ranks."""

    dim: int | None = None
    """The divided dimension; None: every rank has the whole parameter."""
    sections: tuple[int, ...] = ()
    """Sizes along `dim` of sections that are divided separately (queries, keys, values)."""
    rows: int | None = None
    """Rows without padding; on a rank rows of zeros follow."""
    partial: bool = False
    """Whether, with sequence parallel, the gradients of the ranks must be summed."""

    def whole_shape(self, own: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of the whole parameter, from the shape `own` on each of `size` ranks."""
        shape = list(own)
        if self.dim is not None:
            shape[self.dim] *= size
        if self.rows is not None:
            shape[0] = self.rows
        return tuple(shape)

    def take(self, whole: Tensor, rows: int, parallel: Parallel) -> Tensor:
        """Return this rank's part of a whole; `rows`: rows of the part, padding included."""
        if self.rows is not None:
            whole = F.pad(whole, (0, 0, 0, rows * parallel.size - self.rows))
        if self.dim is None or parallel.size == 1:
            return whole
        sections = whole.split(self.sections or whole.shape[self.dim], self.dim)
        return torch.cat([part.chunk(parallel.size, self.dim)[parallel.rank] for part in sections], self.dim)


WHOLE = Cut()


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Return the cut of each parameter, from the `cuts` of the module that owns it."""
    found = {}
    for path, module in model.named_modules():
        own: Mapping[str, Cut] = getattr(module, "cuts", {})
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}" if path else name] = own.get(name, WHOLE)
    return found


def learned(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that a training changes: with adapters, these alone."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def shapes_of(model: nn.Module, parallel: Parallel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter in a checkpoint: of each one that is learned."""
    cuts = cuts_of(model)
    return {
        name: cuts[name].whole_shape(parameter.shape, parallel.size)
        for name, parameter in learned(dict(model.named_parameters())).items()
    }


def own_of(key: str, whole: Tensor, like: Tensor, cuts: Mapping[str, Cut], parallel: Parallel) -> Tensor:
    """Return this rank's part of `whole`, shaped as `like`."""
    return cuts[parameter_of(key, cuts)].take(whole, like.shape[0], parallel)


def parameter_of(key: str, cuts: Mapping[str, Cut]) -> str:
    """Return the name of the parameter that a tensor of a state belongs to."""
    return key if key in cuts else key.split(".", 1)[1]
