"""Several corpora as one: compiled and plain code agree, shares are kept, and nothing runs dry."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from native.samples import sample_index
from trainer.config.data import DataConfig, Source
from trainer.corpus.indexed import Writer
from trainer.samples.blend import (
    BlendOrder,
    blend_order,
    normal,
    plain_blend,
)
from trainer.samples.dataset import Data


@pytest.mark.parametrize("seed", range(20))
def test_compiled_and_plain_code_give_one_order(seed: int) -> None:
    if sample_index.why_not():
        pytest.skip(sample_index.why_not())
    random = np.random.RandomState(seed)
    weights = random.gamma(0.5, size=random.randint(1, 40)) + 1e-3
    size = int(random.randint(1, 2000))
    most = [int(n) for n in random.randint(0, 1 + 2 * size // len(weights), len(weights))] if seed % 2 else []
    size = min(size, sum(most)) if most else size
    got = blend_order(weights.tolist(), size, most)
    limits = np.asarray(most or [np.inf] * len(weights), np.float64)
    corpus, sample = plain_blend(np.asarray(normal(weights.tolist())), limits, size)
    np.testing.assert_array_equal(got.corpus, corpus)
    np.testing.assert_array_equal(got.sample, sample)


def test_each_corpus_keeps_its_share_all_the_way() -> None:
    order = blend_order([5.0, 3.0, 2.0], 10_000)
    for part in (10, 100, 1000, 10_000):
        counts = np.bincount(order.corpus[:part], minlength=3)
        assert np.abs(counts - np.array([0.5, 0.3, 0.2]) * part).max() <= 1


def test_a_spent_corpus_is_passed_over() -> None:
    order = blend_order([1.0, 1.0], 7, available=[2, 5])
    assert order.corpus.tolist() == [0, 1, 0, 1, 1, 1, 1]
    assert order.sample.tolist() == [0, 0, 1, 1, 2, 3, 4]


def written(folder: Path, number: int, documents: int) -> str:
    """A corpus whose every token is its number."""
    with Writer(folder / f"c{number}", np.uint16) as writer:
        for _ in range(documents):
            writer.add_document([[number] * 40])
    return str(folder / f"c{number}")


def test_items_come_from_the_corpora_that_the_order_names(tmp_path: Path) -> None:
    sources = tuple(Source(written(tmp_path, i, 6), weight) for i, weight in enumerate((0.7, 0.2, 0.1)))
    blend = Data(DataConfig(blend=sources, split="1"), 10).samples("train", 50)
    items = blend.read(np.arange(len(blend)))
    assert items.shape == (len(blend), 11)
    assert (items == items[:, :1]).all()
    assert np.bincount(items[:50, 0]).tolist() == [35, 10, 5]
    assert blend[3].tolist() == items[3].tolist()


def test_a_corpus_that_rounding_asks_too_much_of_is_made_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-core ends with an error there, and asks for a larger surplus."""
    sources = tuple(Source(written(tmp_path, i, 1), 1.0) for i in range(2))
    skewed = BlendOrder(np.array([0] * 9 + [1], np.int16), np.array([*range(9), 0]))
    monkeypatch.setattr("trainer.samples.dataset.blend_order", lambda weights, size, available: skewed)
    blend = Data(DataConfig(blend=sources, split="1"), 10).samples("train", 10)
    assert blend.read(np.arange(10))[:, 0].tolist() == [0] * 9 + [1]
