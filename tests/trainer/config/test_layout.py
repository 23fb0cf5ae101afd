from __future__ import annotations

import pytest

from trainer.config.layout import (
    Layout,
    nearest_batches,
    piece_layers,
    stage_pieces,
)


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
    with pytest.raises(ValueError, match="not divisible"):
        Layout.of(6, tensor=4)


def test_the_nearest_batches_surround_the_asked_one_and_are_never_zero() -> None:
    assert nearest_batches(30, 4, 2) == (24, 32)
    assert nearest_batches(3, 4, 2) == (8, 8)


def test_layers_that_do_not_divide_go_to_the_middle_of_a_pipeline() -> None:
    assert piece_layers(24, 4) == (6, 6, 6, 6)
    assert piece_layers(10, 4) == (2, 3, 3, 2)
    assert piece_layers(5, 4) == (1, 2, 1, 1)
    assert piece_layers(10, 4, (1, 4, 4, 1)) == (1, 4, 4, 1)
    assert all(sum(piece_layers(layers, 7)) == layers for layers in range(7, 60))


def test_an_interleaved_stage_holds_every_so_manieth_piece() -> None:
    assert [stage_pieces(stage, 2, 3) for stage in (0, 1)] == [(0, 2, 4), (1, 3, 5)]
