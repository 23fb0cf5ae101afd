"""Describe the masks and the dropout of attention without a tensor as large as the scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys attention hides in addition to later keys, and which later keys it shows."""

    window: int = 0
    """How many keys a query sees: its own and those right before it; 0: all before it."""
    documents: Tensor | None = None
    """Numbers (batch, keys): a query sees only keys with the same number as the key at its own position."""
    source: Tensor | None = None
    """Lengths (batch,): every query sees this many first keys. Not possible together with a window."""
    made: dict[object, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Masks already made for backends that need tensors, by sizes and device; all layers of a pass share them."""

    @property
    def is_empty(self) -> bool:
        return not self.window and self.documents is None and self.source is None


@dataclass(frozen=True)
class Dropout:
    """Which probabilities are dropped: it depends on the state and on a probability's indices; see native.philox."""

    chance: float
    state: Tensor | None = None
    """One int64 number in CPU memory. None, on devices other than a CPU: the device's own generator decides."""
    first_head: int = 0
    """The number of this call's first head among `heads`: ranks that divide the heads must drop differently."""
    heads: int = 0
    """The number of heads on all ranks; 0: only those of this call."""

    @property
    def threshold(self) -> int:
        """Return the threshold: a random 32-bit word below it drops a number."""
        return threshold_of(self.chance)


def threshold_of(chance: float, bits: int = 32) -> int:
    """Return how many of the random numbers with so many bits drop a number."""
    count = 1 << bits
    return min(round(chance * count), count - 1)


EVERY_KEY = Mask()
