"""Describe the columns of a vocabulary that one rank has, and the ranks' exchange of a few numbers per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# How many bytes of logits exist at a time. Each further piece reads and writes the gradient of the matrix once more; on
# a CPU this is a small part of the product's time. 1 GB has the logits of 8 x 1,024 tokens of GPT-2 in one piece. A
# large device has more: of 141 GB a 32nd part, which has those of 8 x 1,024 tokens of 256,000 columns.
PIECE, CPU_PIECE, SHARE = 1 << 30, 48 << 20, 32


def tokens_at_a_time(tokens: int, columns: int, hidden: int, width: int, memory: int) -> int:
    """Return for how many tokens the logits, `columns` per token, exist at a time; `width`: bytes per number.

    memory: that of the device, in bytes; 0: a CPU.

    On a CPU the pieces are equal, with up to 1.5 times CPU_PIECE: a few tokens left over for a last piece would take
    far longer than their share, because each piece reads the whole matrix.
    """
    is_cpu = not memory
    piece = CPU_PIECE if is_cpu else max(PIECE, memory // SHARE)
    # With several pieces, bf16 gradients are added in fp32, which needs as much memory as many tokens' logits.
    sums = 2 * columns * hidden if is_cpu and width < 4 else 0
    whole = tokens * columns * width <= piece + sums
    if not is_cpu or whole:
        return max(1, tokens if whole else piece // (columns * width))
    pieces = max(1, round(tokens * columns * width / piece))
    return max(1, -(-tokens // pieces))


@dataclass(frozen=True)
class VocabularyPart:
    """One rank's columns of the logits; without `gather` this rank has all columns."""

    vocabulary: int
    """The number of ids on all ranks."""
    first: int = 0
    """The id of the first column."""
    columns: int = -1
    """The number of columns before the padding, which has no loss and no gradient; -1: `vocabulary`."""
    gather: Callable[[Tensor], Tensor] | None = None
    """Takes this rank's numbers (3, tokens); returns those of all ranks, (ranks, 3, tokens)."""

    @property
    def own(self) -> int:
        return self.vocabulary if self.columns < 0 else self.columns
