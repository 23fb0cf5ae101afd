"""Parameters under logical names: whole and unpadded in a checkpoint, cut and padded on a rank.

Names and whole shapes are the same in every layout, so what one layout saved any other loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel import Parallel


@dataclass(frozen=True)
class Cut:
    """How one parameter is divided among the tensor parallel ranks."""

    dim: int | None = None
    """Along which dimension; None: every rank has it whole."""
    sections: tuple[int, ...] = ()
    """Parts along `dim` that are divided each by itself (queries, keys, values); one if left out."""
    rows: int | None = None
    """Rows of the whole that mean something; on a rank there is padding behind them, of zeros."""
    partial: bool = False
    """Whether, with sequence parallel, a rank's gradient is only a part of a sum."""

    def whole_shape(self, own: torch.Size, size: int) -> tuple[int, ...]:
        """The shape in a checkpoint, of what has the shape `own` on each of `size` ranks."""
        shape = list(own)
        if self.dim is not None:
            shape[self.dim] *= size
        if self.rows is not None:
            shape[0] = self.rows
        return tuple(shape)

    def take(self, whole: Tensor, rows: int, parallel: Parallel) -> Tensor:
        """A rank's part of a whole; `rows`: of that part, where padding may be among them."""
        if self.rows is not None:
            whole = F.pad(whole, (0, 0, 0, rows * parallel.size - self.rows))
        if self.dim is None or parallel.size == 1:
            return whole
        sections = whole.split(self.sections or whole.shape[self.dim], self.dim)
        return torch.cat([part.chunk(parallel.size, self.dim)[parallel.rank] for part in sections], self.dim)

    def join(self, own: Tensor, parallel: Parallel) -> Tensor:
        """The whole, of all ranks' parts; for all of them together."""
        if self.dim is not None and parallel.size > 1:
            own = self._together(own, parallel)
        return own if self.rows is None else own[: self.rows]

    def _together(self, own: Tensor, parallel: Parallel) -> Tensor:
        assert self.dim is not None
        parts = parallel.gather(own, self.dim).chunk(parallel.size, self.dim)
        sizes = [section // parallel.size for section in self.sections] or [own.shape[self.dim]]
        split = [part.split(sizes, self.dim) for part in parts]
        return torch.cat([part[i] for i in range(len(sizes)) for part in split], self.dim)


WHOLE = Cut()
INTO_RESIDUAL = ("attention.out.weight", "feed_forward.down.weight")


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Of each parameter its cut, as the module that owns it says in `cuts`."""
    found = {}
    for path, module in model.named_modules():
        own: Mapping[str, Cut] = getattr(module, "cuts", {})
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}" if path else name] = own.get(name, WHOLE)
    return found


@torch.no_grad()
def initialize(model: nn.Module, std: float, into_residual: float, seed: int, parallel: Parallel) -> None:
    """Matrices from normal(0, std), those that write into the residual from normal(0, into_residual).

    Each is drawn whole by a generator of its own name and then cut: every layout begins with the same model.
    """
    cuts = cuts_of(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or parameter.is_meta:
            continue  # biases and layer norms are already 0 and 1
        whole = torch.empty(cuts[name].whole_shape(parameter.shape, parallel.size))
        deviation = into_residual if name.endswith(INTO_RESIDUAL) else std
        whole.normal_(0.0, deviation, generator=generator_of(seed, name))
        parameter.copy_(cuts[name].take(whole, parameter.shape[0], parallel))


def generator_of(seed: int, name: str) -> torch.Generator:
    """Random numbers of a name's own."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def whole_of(
    tensors: Mapping[str, Tensor], cuts: Mapping[str, Cut], parallel: Parallel, device: str = ""
) -> dict[str, Tensor]:
    """Parameters, or moments (`exp_avg.<name>`), whole on rank 0; for all tensor parallel ranks together.

    What is put together lies in the node's memory: a device need not have room for the whole model. `device`: where
    ranks can exchange what lies elsewhere.
    """
    found = {}
    for key, tensor in tensors.items():
        if parallel.size > 1 and device:
            tensor = tensor.to(device)
        whole = cuts[parameter_of(key, cuts)].join(tensor, parallel)
        if parallel.size > 1:
            whole = whole.cpu() if parallel.rank == 0 else tensor
        found[key] = whole
    return found


def own_of(key: str, whole: Tensor, like: Tensor, cuts: Mapping[str, Cut], parallel: Parallel) -> Tensor:
    """The reverse of `whole_of` for one tensor, to be copied into `like`."""
    return cuts[parameter_of(key, cuts)].take(whole, like.shape[0], parallel)


def parameter_of(key: str, cuts: Mapping[str, Cut]) -> str:
    """The parameter that a tensor of a state belongs to: its own name, or what follows the moment's."""
    return key if key in cuts else key.split(".", 1)[1]
