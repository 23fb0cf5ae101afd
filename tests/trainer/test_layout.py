from __future__ import annotations

import pytest

from trainer.layout import Layout, nearest_batches


def test_tensor_neighbours_are_neighbouring_ranks_and_stages_are_far_apart() -> None:
    layout = Layout.of(16, tensor=2, pipeline=2)
    assert layout == Layout(data=4, tensor=2, pipeline=2)
    assert [layout.place(rank) for rank in (0, 1, 2, 8, 15)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (1, 3, 1),
    ]


def test_every_rank_of_4096_has_a_place_of_its_own() -> None:
    layout = Layout.of(4096, tensor=8, pipeline=16)
    assert len({layout.place(rank) for rank in range(4096)}) == 4096


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        Layout.of(6, tensor=4)


def test_the_nearest_batches_surround_the_asked_one_and_are_never_zero() -> None:
    assert nearest_batches(30, 4, 2) == (24, 32)
    assert nearest_batches(3, 4, 2) == (8, 8)
