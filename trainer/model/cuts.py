"""How each parameter is divided among the tensor parallel ranks.

In a checkpoint a parameter is whole and unpadded; on a rank it is cut and padded. Names and whole shapes are the same
in every layout, so any layout can load what another saved.
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
    """The number of rows without padding; on a rank, rows of zeros follow."""
    partial: bool = False
    """Whether the gradients of the ranks must be summed with sequence parallel."""

    def whole_shape(self, own: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of the whole parameter, from the shape `own` on each of `size` ranks."""
        shape = list(own)
        if self.dim is not None:
            shape[self.dim] *= size
        if self.rows is not None:
            shape[0] = self.rows
        return tuple(shape)

    def take(self, whole: Tensor, rows: int, parallel: Parallel) -> Tensor:
        """Return this rank's part of a whole parameter; `rows`: the rows of the part, padding included."""
        if self.rows is not None:
            whole = F.pad(whole, (0, 0, 0, rows * parallel.size - self.rows))
        if self.dim is None or parallel.size == 1:
            return whole
        sections = whole.split(self.sections or whole.shape[self.dim], self.dim)
        return torch.cat([part.chunk(parallel.size, self.dim)[parallel.rank] for part in sections], self.dim)


WHOLE = Cut()


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Return the cut of each parameter, collected from the `cuts` of the modules."""
    found = {}
    for path, module in model.named_modules():
        own: Mapping[str, Cut] = getattr(module, "cuts", {})
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}" if path else name] = own.get(name, WHOLE)
    return found


def learned(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes; with adapters, only theirs."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def shapes_of(model: nn.Module, parallel: Parallel) -> dict[str, tuple[int, ...]]:
    """Return the shape in a checkpoint of each parameter that training changes."""
    cuts = cuts_of(model)
    return {
        name: cuts[name].whole_shape(parameter.shape, parallel.size)
        for name, parameter in learned(dict(model.named_parameters())).items()
    }


def own_of(key: str, whole: Tensor, like: Tensor, cuts: Mapping[str, Cut], parallel: Parallel) -> Tensor:
    """Return this rank's part of `whole`, with the shape of `like`."""
    return cuts[parameter_of(key, cuts)].take(whole, like.shape[0], parallel)


def parameter_of(key: str, cuts: Mapping[str, Cut]) -> str:
    """Return the name of the parameter that a tensor of the optimizer state belongs to."""
    return key if key in cuts else key.split(".", 1)[1]
