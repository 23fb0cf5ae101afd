"""Tensors that are composed of parts of others read each of them no more often than necessary."""

from __future__ import annotations

import pytest
import torch

from trainer.config.attention import Heads
from trainer.model.cuts import Cut
from trainer.weights.attention import Rows, from_sections, in_sections
from trainer.weights.lazy import Lazy
from trainer.weights.tensor_parts import joined, part_of

HEADS = Heads(hidden=24, heads=8, groups=4, size=3)
ROWS = HEADS.outputs
SECTIONS = (24, 12, 12)


class Counted:
    """A tensor of `rows` rows that counts how often it is read."""

    def __init__(self, rows: int, at_once: bool) -> None:
        self.reads = 0
        self.numbers = torch.arange(rows * 2.0).view(rows, 2)
        self.lazy = Lazy((rows, 2), torch.float32, self._read, at_once)

    def _read(self, start: int, stop: int) -> torch.Tensor:
        self.reads += 1
        return self.numbers[start:stop].clone()


@pytest.mark.parametrize("at_once", [True, False])
def test_rows_in_another_order_are_read_once(at_once: bool) -> None:
    given = Counted(ROWS, at_once)
    sections = in_sections(given.lazy, Rows.GROUPS, HEADS)
    assert sections.whole().shape == (ROWS, 2)
    assert given.reads == (1 if at_once else 3 * HEADS.groups)
    back = from_sections(in_sections(given.lazy, Rows.GROUPS, HEADS), Rows.GROUPS, HEADS)
    assert torch.equal(back.whole(), given.numbers)
    assert torch.equal(torch.cat(list(back.blocks())), given.numbers)


@pytest.mark.parametrize("at_once", [True, False])
def test_parts_of_ranks_are_read_once(at_once: bool) -> None:
    whole = Counted(sum(SECTIONS), at_once)
    cut = Cut(dim=0, sections=SECTIONS)
    parts = [part_of(whole.lazy, cut, rank, 2) for rank in range(2)]
    assert all(part.at_once is at_once for part in parts)
    again = joined(parts, cut)
    whole.reads = 0
    assert torch.equal(again.whole(), whole.numbers)
    assert whole.reads == (2 if at_once else 2 * len(SECTIONS))
