"""Describe what attention hides and drops, without a mask as large as the scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys attention hides in addition to later ones, and which later ones it shows."""

    window: int = 0
    """Keys that a query sees: its own and those right before it; 0: all before it."""
    documents: Tensor | None = None
    """Numbers (batch, keys): a query sees only keys with the number that the key at its own place has."""
    source: Tensor | None = None
    """Lengths (batch,): every query sees this many first keys. Not together with a window."""
    made: dict[tuple[int, int], Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Masks already made from this description for backends that need one; all layers of a pass share them."""

    @property
    def is_empty(self) -> bool:
        return not self.window and self.documents is None and self.source is None


@dataclass(frozen=True)
class Dropout:
    """Which probabilities are dropped: a function of the state and of a probability's place, as native.philox says."""

    chance: float
    state: Tensor
    """One int64 number in the node's memory."""
    first_head: int = 0
    """The number of the first head of this call among `heads`: ranks that divide the heads drop different ones."""
    heads: int = 0
    """Heads of all ranks; 0: those of this call."""

    @property
    def threshold(self) -> int:
        """Return the number below which a random 32-bit word drops."""
        return threshold_of(self.chance)


def threshold_of(chance: float) -> int:
    """Return how many of the 32-bit words drop."""
    return min(round(chance * 2**32), 2**32 - 1)


EVERY_KEY = Mask()
