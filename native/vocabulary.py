"""Describe the columns of a vocabulary that one rank has, and how its ranks exchange a few numbers for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """One rank's columns of the logits; without `gather` it has all of them."""

    vocabulary: int
    """Ids of all ranks."""
    first: int = 0
    """The id of the first column."""
    columns: int = -1
    """Columns before the padding, which has no loss and no gradient; -1: as many as `vocabulary`."""
    gather: Callable[[Tensor], Tensor] | None = None
    """Takes this rank's numbers (3, tokens), and returns those of all ranks, (ranks, 3, tokens)."""

    @property
    def own(self) -> int:
        return self.vocabulary if self.columns < 0 else self.columns
