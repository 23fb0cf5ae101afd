"""Describe the columns of a vocabulary that one rank has, and how its ranks exchange a few numbers for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of logits at a time. Each additional piece reads and writes the gradient of the matrix once more; on a CPU this
# is a small part of its product.
PIECE, CPU_PIECE = 256 << 20, 64 << 20


def tokens_at_a_time(tokens: int, columns: int, hidden: int, width: int, is_cpu: bool) -> int:
    """Return how many tokens have their logits of `columns` words at the same time; `width`: bytes of a number."""
    piece = CPU_PIECE if is_cpu else PIECE
    # Several gradients of a bf16 matrix are added in fp32, which takes as much memory as the logits of many tokens.
    sums = 2 * columns * hidden if is_cpu and width < 4 else 0
    whole = tokens * columns * width <= piece + sums
    return max(1, tokens if whole else piece // (columns * width))


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
