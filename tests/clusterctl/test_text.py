"""Numbers as people read them."""

from __future__ import annotations

import pytest

from clusterctl.text import count, size
from trainer.plan.checkpoints import size_text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1.4e9, "1.4 GB"), (999.6e6, "1 GB"), (2.1e12, "2.1 TB")],
)
def test_sizes_have_three_digits_and_the_unit_that_fits(number: float, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (999_600, "1M"), (1.75e11, "175B"), (2.5e12, "2.5T")]
)
def test_counts_have_three_digits_and_the_letter_that_fits(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(5_000_000, "5 MB"), (999_700_000, "1 GB"), (2_100_000_000_000, "2.1 TB")]
)
def test_the_trainer_writes_sizes_in_the_same_way(number: int, text: str) -> None:
    assert size_text(number) == text
