"""The mask of dropout depends on seed and counter alone."""

from __future__ import annotations

import pytest
import torch

import native
from native import philox
from native.cpu.dropout_add import dropout_add
from native.masks import threshold_of
from native.philox import kept_numbers


@pytest.mark.parametrize("offset", [0, (1 << 32) - 3, (1 << 62) - 1])
def test_the_kernel_drops_the_same_numbers_with_any_number_of_threads(compiled: object, offset: int) -> None:
    x, state = torch.ones(70, 1027), torch.tensor([(1 << 62) - 12345, offset])
    expected = kept_numbers(x.shape, state, 0.3)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(dropout_add(x, torch.zeros_like(x), None, state, 0.3) != 0, expected)
    finally:
        torch.set_num_threads(threads)
    assert float(expected.float().mean()) == pytest.approx(0.7, abs=0.01)


def test_a_later_counter_continues_the_same_numbers() -> None:
    whole = kept_numbers(torch.Size([400]), torch.tensor([7, 5]), 0.5)
    later = kept_numbers(torch.Size([200]), torch.tensor([7, 30]), 0.5)
    assert torch.equal(whole[200:], later)


@pytest.mark.parametrize(("probability", "threshold"), [(0.0, 0), (0.5, 1 << 31), (1 - 1e-12, (1 << 32) - 1)])
def test_the_threshold_is_the_share_of_words(probability: float, threshold: int) -> None:
    assert threshold_of(probability) == threshold
    assert threshold_of(probability, 16) == threshold >> 16


def test_a_number_is_kept_if_its_half_of_a_word_is_large_enough() -> None:
    first, second = philox.words(9, torch.tensor([3, 4]))[:, 1].tolist()
    kept = kept_numbers(torch.Size([2, 8]), torch.tensor([9, 3]), 0.4)
    for row, word in zip(kept.tolist(), (first, second), strict=True):
        assert row[2:4] == [half >= round(0.4 * 65536) for half in (word & 0xFFFF, word >> 16)]


def test_a_device_that_draws_itself_repeats_its_mask_for_the_same_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(philox, "draws_itself", lambda device: True)
    probabilities = torch.rand(2, 3, 50, 40, dtype=torch.bfloat16)

    def drawn(state: int, first_head: int = 0) -> torch.Tensor:
        return philox.factors(native.Dropout(0.25, torch.tensor(state), first_head), probabilities)

    assert torch.equal(drawn(7), drawn(7))
    assert not torch.equal(drawn(7), drawn(8)) and not torch.equal(drawn(7), drawn(7, first_head=3))
    assert drawn(7).unique().tolist() == [0.0, torch.tensor(4 / 3).bfloat16().item()]
    assert float((drawn(7) > 0).float().mean()) == pytest.approx(0.75, abs=0.02)
