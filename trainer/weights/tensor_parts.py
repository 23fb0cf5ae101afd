"""Join a tensor that another program divided among its tensor parallel ranks, or cut a whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.model.cuts import Cut
from trainer.weights.lazy import Lazy, columns_of, read_once, rows_of, side_by_side, stacked


def joined(parts: Sequence[Lazy], cut: Cut) -> Lazy:
    """Return the whole tensor from the ranks' parts; the rows of a token table keep their padding."""
    if cut.dim is None or len(parts) == 1:
        return parts[0]
    if cut.dim == 1:
        return side_by_side(parts)
    if not cut.sections:
        return stacked(parts)
    return read_once(parts, lambda parts: _joined_sections(parts, cut.sections))


def _joined_sections(parts: Sequence[Lazy], sections: Sequence[int]) -> Lazy:
    pieces, first = [], 0
    for size in sections:
        each = size // len(parts)
        pieces += [rows_of(part, first, first + each) for part in parts]
        first += each
    return stacked(pieces)


def part_of(whole: Lazy, cut: Cut, rank: int, ranks: int) -> Lazy:
    """Return one rank's part of a whole tensor, whose rows may already be padded."""
    if cut.dim is None or ranks == 1:
        return whole
    if cut.dim == 1:
        each = whole.shape[1] // ranks
        return columns_of(whole, rank * each, (rank + 1) * each)
    sections = cut.sections or (whole.rows,)
    return read_once([whole], lambda parts: _part_of_sections(parts[0], sections, rank, ranks))


def _part_of_sections(whole: Lazy, sections: Sequence[int], rank: int, ranks: int) -> Lazy:
    pieces, first = [], 0
    for size in sections:
        each = size // ranks
        pieces.append(rows_of(whole, first + rank * each, first + (rank + 1) * each))
        first += size
    return stacked(pieces)
