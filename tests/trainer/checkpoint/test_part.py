from __future__ import annotations

import pytest
import torch

from trainer.checkpoint.part import Part, flat_boxes, intersection, volume
from trainer.engine.parts import Place
from trainer.model.cuts import Cut
from trainer.parallel.tensor import Parallel


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 4, 2), (1, 6), (6, 1)])
def test_the_boxes_of_a_flat_range_are_its_numbers_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = list(flat_boxes(shape, start, stop))
            parts = [whole[tuple(slice(*one) for one in box)].flatten() for box in boxes]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1


def test_intersections() -> None:
    assert intersection(((0, 4), (2, 9)), ((3, 8), (0, 3))) == ((3, 4), (2, 3))
    assert intersection(((0, 4),), ((4, 8),)) is None
    assert volume(((3, 4), (2, 5))) == 3


CUTS = [
    pytest.param((12, 5), Cut(), id="whole"),
    pytest.param((12, 5), Cut(0), id="columns"),
    pytest.param((5, 12), Cut(1), id="rows"),
    pytest.param((16,), Cut(0, (8, 4, 4)), id="qkv-bias"),
    pytest.param((16, 3), Cut(0, (8, 4, 4)), id="qkv"),
    pytest.param((11, 3), Cut(0, rows=11), id="padded-table"),
    pytest.param((3, 3), Cut(0, rows=3), id="table-with-a-rank-of-padding-alone"),
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("shape", "cut"), CUTS)
def test_the_parts_of_all_ranks_make_the_logical_tensor(shape: tuple[int, ...], cut: Cut, size: int) -> None:
    """Whole on a rank, by rows, and by flat ranges, as the engines divide a rank's tensor."""
    logical = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    rows = -(-shape[0] // (4 * size)) * 4 if cut.rows is not None else shape[0]
    for divided in ("whole", "rows", "flat"):
        filled = torch.zeros(shape)
        for rank in range(size):
            parallel = Parallel(rank, size)
            own = cut.take(logical, rows, parallel)
            place = Place(own.shape, cut, parallel)
            assert place.shape == shape
            found: list[Part] = []
            if divided == "whole":
                found += place.part("w", own, True)
            elif divided == "rows":
                for first in range(0, len(own), 3):
                    found += place.rows(first, "w", own[first : first + 3], True)
            else:
                for start in range(0, own.numel(), 7):
                    found += place.flat("w", start, own.flatten()[start : start + 7], True)
            for part in found:
                target = filled[tuple(slice(*one) for one in part.box)]
                assert cut.dim is None or not target.any(), "each number is in one part"
                target.copy_(part.tensor)
        assert torch.equal(filled, logical), divided
