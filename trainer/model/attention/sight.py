"""Values that the attention of all blocks shares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import native
from native.masks import EVERY_KEY
from trainer.parallel.tensor import ALONE, Parallel


@dataclass(frozen=True)
class Sight:
    """Values that all blocks of one pass share: the mask, and the rotary positions."""

    mask: native.Mask = EVERY_KEY
    """The keys that are hidden in addition to those after a query."""
    turns: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary positions."""
    context: Parallel = ALONE
    """Context parallel: the ranks that have other parts of the same samples."""
    aux_weight: float | Tensor = 0.0
    """The weight of the experts' auxiliary loss in the loss of the step."""
    windowed: Sight | None = None
    """What layers with a window see, if others have none."""


PLAIN = Sight()


def picked(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Return the wanted rows of (batch, sequence, width) as one sample; `wanted` are indices over all samples."""
    return x if wanted is None else x.flatten(0, 1)[wanted].unsqueeze(0)
