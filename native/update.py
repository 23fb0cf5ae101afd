"""What an optimizer's step is given, whichever backend takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, float]


@dataclass(frozen=True)
class AdamWStep:
    """The `step`-th (from 1) update of `held` and its moments, from gradients of any type times `factor`.

    Gradients may be destroyed.
    """

    held: Sequence[Tensor]
    gradients: Sequence[Tensor]
    averages: Sequence[Tensor]
    squares: Sequence[Tensor]
    lowered: Sequence[Tensor | None]
    """For each tensor its copy in another type, written anew, or None."""
    decays: Sequence[float]
    step: int
    rate: float
    betas: tuple[float, float]
    eps: float
    factor: float = 1.0

    def rows(self) -> Iterator[Row]:
        """Tensor by tensor: held, gradient, average, square, lowered, decay."""
        tensors = (self.held, self.gradients, self.averages, self.squares)
        return zip(*tensors, self.lowered, self.decays, strict=True)
