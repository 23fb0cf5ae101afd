"""The input of one optimizer step, the same for every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, float]


@dataclass(frozen=True)
class AdamWStep:
    """AdamW update number `step` (from 1) of the masters `held` and their moments.

    Gradients may have any floating-point type; they are multiplied by `factor` and may be overwritten.
    """

    held: Sequence[Tensor]
    gradients: Sequence[Tensor]
    averages: Sequence[Tensor]
    squares: Sequence[Tensor]
    lowered: Sequence[Tensor | None]
    """For each tensor None, or a copy in another type, which is overwritten with the new values."""
    decays: Sequence[float]
    step: int
    rate: float
    betas: tuple[float, float]
    eps: float
    factor: float | Tensor = 1.0
    """A number. Backends with `Choice.reads_factor` also take a tensor in fp32; with NaN nothing changes."""
    remainders: Sequence[Tensor | None] = ()
    """For each tensor None, or an int16 tensor: then `held` has the bf16 weight, and both together are the master, as
    `native.masters` says."""

    def rows(self) -> Iterator[Row]:
        """Yield for each tensor: master or bf16 weight, gradient, average, square, lowered copy, decay."""
        tensors = (self.held, self.gradients, self.averages, self.squares)
        return zip(*tensors, self.lowered, self.decays, strict=True)
