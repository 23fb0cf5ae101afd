"""The order of the samples: against Megatron-core (or what it answered), and against the recipe in plain loops."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native.samples import sample_index
from tests.support import orders
from trainer.corpus.indexed import Corpus, Writer, open_corpus
from trainer.samples.gpt import (
    Recipe,
    Samples,
    follow,
    plain_starts,
    sample_starts,
)
from trainer.splits import split_bounds, split_fractions

# Of cases; each a test, so that a failure names where to look.
BLOCKS = 20
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


def corpus_of(folder: Path, lengths: list[int]) -> Corpus:
    """Documents whose tokens count up through the corpus, so that each token identifies its position."""
    start = 0
    with Writer(folder / "counting", np.int32) as writer:
        for length in lengths:
            writer.add_document([list(range(start, start + length))])
            start += length
    return open_corpus(folder / "counting")


@pytest.fixture(scope="module")
def goldens() -> list[dict[str, str]]:
    kept: list[dict[str, str]] = json.loads(orders.GOLDENS.read_text())
    return kept


@pytest.mark.parametrize("block", range(BLOCKS))
def test_samples_labels_masks_and_blends_are_those_of_megatron_core(
    block: int, tmp_path: Path, goldens: list[dict[str, str]]
) -> None:
    assert len(goldens) == orders.CASES
    for case in range(block, len(goldens), BLOCKS):
        asked = orders.setting(case)
        answers = orders.ours(asked, orders.write_corpora(asked, tmp_path))
        assert {which: answer.digest() for which, answer in answers.items()} == goldens[case], (case, asked)


@pytest.mark.skipif(
    not HAS_MEGATRON, reason="megatron-core is not installed; its kept answers are compared instead"
)
@pytest.mark.parametrize("case", range(40))
def test_megatron_core_itself_gives_the_same(case: int, tmp_path: Path) -> None:
    asked = orders.setting(case)
    prefixes = orders.write_corpora(asked, tmp_path)
    theirs, ours = orders.megatron(asked, prefixes), orders.ours(asked, prefixes)
    assert list(ours) == list(theirs)
    for which, answer in ours.items():
        for name, array in answer.arrays.items():
            np.testing.assert_array_equal(array, theirs[which].arrays[name], err_msg=f"{which} {name}")


def test_the_cases_meet_every_kind_of_order() -> None:
    """Of the recipe's branches each is taken by many cases: otherwise equality would prove little."""
    from trainer.samples.gpt import Recipe

    met = {"one epoch": 0, "apart": 0, "not apart": 0, "empty first": 0, "longer than all": 0}
    for case in range(0, 400):
        asked = orders.setting(case)
        count = asked.samples[0]
        if asked.kind != "plain" or count is None:
            continue
        lengths = np.array(asked.lengths[0], np.int32)
        recipe = Recipe.of(
            lengths, split_bounds(asked.split, len(lengths))[0], count, asked.sequence, asked.seed
        )
        kind = "one epoch" if recipe.epochs == 1 else "apart" if recipe.before is not None else "not apart"
        met[kind] += 1
        order = follow(Recipe.of(lengths, recipe.bounds, count, asked.sequence, asked.seed), lengths)
        met["empty first"] += not lengths[order.documents[0]]
        met["longer than all"] += asked.sequence >= max(asked.lengths[0])
    assert min(met.values()) >= 5, met


def by_hand(lengths: list[int], bounds: tuple[int, int], n: int, s: int, seed: int) -> list[list[int]]:
    """The recipe in plain loops: every sample as the places of its tokens in the corpus."""
    own = list(range(*bounds))
    tokens = sum(lengths[i] for i in own)
    epochs = 1
    while epochs * tokens < n * s + 1:
        epochs += 1
    apart, before = False, 0
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // s
        apart = n - before < int(0.80 * ((tokens - 1) // s))
    random = np.random.RandomState(seed)
    if apart:
        first = np.array(own * (epochs - 1), np.int32)
        last = np.array(own, np.int32)
        random.shuffle(first)
        random.shuffle(last)
        documents = [*first, *last]
    else:
        whole = np.array(own * epochs, np.int32)
        random.shuffle(whole)
        documents = list(whole)
    starts = np.cumsum([0, *lengths])
    stream = [starts[i] + j for i in documents for j in range(lengths[i])]
    count = (epochs * tokens - 1) // s
    order = np.arange(count, dtype=np.uint32)
    if apart:
        random.shuffle(order[:before])
        random.shuffle(order[before:])
    else:
        random.shuffle(order)
    return [[int(t) for t in stream[i * s : i * s + s + 1]] for i in order]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", range(60))
def test_samples_come_in_the_order_of_the_recipe(
    tmp_path: Path, case: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(sample_index, "why_not", lambda: "not here")
    random = np.random.RandomState(case)
    lengths = random.randint(0 if case % 3 == 0 else 1, 40, random.randint(3, 30)).tolist()
    sequence, samples, seed = (int(random.randint(*edges)) for edges in ((1, 20), (0, 200), (1, 99)))
    corpus = corpus_of(tmp_path, lengths)
    bounds = split_bounds(["949,50,1", "80,20", "1", "50,25,25"][case % 4], len(lengths))[0]
    if not sum(lengths[slice(*bounds)]):
        return
    got = Samples(
        corpus, follow(Recipe.of(corpus.lengths, bounds, samples, sequence, seed), corpus.lengths), sequence
    )
    want = by_hand(lengths, bounds, samples, sequence, seed)
    assert len(got) == len(want) >= samples
    assert [got[k].tolist() for k in range(len(got))] == want
    assert got.read(np.arange(len(got))[::-1]).tolist() == want[::-1]


def test_splits_meet_without_gap_or_overlap() -> None:
    assert split_bounds("949,50,1", 79) == [(0, 75), (75, 79), (79, 79)]
    assert split_bounds("1,1,1", 10) == [(0, 3), (3, 7), (7, 10)]


def test_every_python_adds_shares_as_megatron_does() -> None:
    """The sum of the shares is 1 - 2^-53; from Python 3.12 on, the built-in `sum` gives 1."""
    assert split_fractions("0.7,0.2,0.1") == (np.array([0.7, 0.2, 0.1]) / np.sum([0.7, 0.2, 0.1])).tolist()
    assert split_fractions("0.7,0.2,0.1") != [0.7, 0.2, 0.1]
    for text in ("0.7,0.2,0.1", "0.3,0.3,0.3", "98.3,1.4,0.3", "1e16,1,1"):
        shares = np.array([float(part) for part in text.split(",")])
        assert split_fractions(text) == (shares / np.sum(shares)).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_many_threads_find_the_same_starts_as_numpy(seed: int) -> None:
    if sample_index.why_not():
        pytest.skip(sample_index.why_not())
    random = np.random.RandomState(seed)
    longest = (3, 30, 3000)[seed % 3]
    lengths = random.randint(0, longest, 20_000).astype(np.int32)
    # Past the number that threads share.
    documents = random.randint(0, len(lengths), 150_000).astype(np.int32)
    sequence = int(random.randint(1, 2 * longest))
    count = (int(lengths[documents].sum(dtype=np.int64)) - 1) // sequence
    want = plain_starts(lengths, documents, sequence, count)
    for threads in (1, 2, 3, 7):
        out: Any = np.full((count + 1, 2), -1, np.int32)
        sample_index.sample_starts(lengths, documents, sequence, out, threads)
        np.testing.assert_array_equal(out, want)
        wide: Any = np.full((count + 1, 2), -1, np.int64)
        sample_index.sample_starts(lengths, documents, sequence, wide, threads)
        np.testing.assert_array_equal(wide, want)
    np.testing.assert_array_equal(sample_starts(lengths, documents, sequence, count), want)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 255, 256, 257, 623, 624, 625, 1000, 65_536, 65_537, 300_000])
def test_compiled_shuffles_are_those_of_numpy_and_leave_the_generator_where_it_would_be(
    size: int, dtype: Any
) -> None:
    if sample_index.why_not():
        pytest.skip(sample_index.why_not())
    ours, theirs = np.random.RandomState(size + 1), np.random.RandomState(size + 1)
    for random in (ours, theirs):
        random.random_sample(size % 700)
    for _ in range(3):
        got, want = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
        sample_index.shuffle(got, ours)
        theirs.shuffle(want)
        np.testing.assert_array_equal(got, want)
        assert ours.randint(2**31) == theirs.randint(2**31)


def test_an_order_of_another_corpus_is_an_error_and_no_crash(tmp_path: Path) -> None:
    large = corpus_of(tmp_path, [50] * 10)
    order = follow(Recipe.of(large.lengths, (0, 10), 20, 10, 1), large.lengths)
    small = corpus_of(tmp_path, [5] * 4)
    with pytest.raises(IndexError, match="sample 40 is not within its corpus"):
        Samples(small, order, 10).read(np.arange(20))
