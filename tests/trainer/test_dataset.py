from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.corpus import Corpus, Writer, open_corpus
from trainer.dataset import Batches, Share, make_order, open_split, split_bounds
from trainer.errors import DataError


def corpus_of(folder: Path, lengths: list[int]) -> Corpus:
    """Documents whose tokens count on through the corpus, so that a token tells its place."""
    start = 0
    with Writer(folder / "counting", np.int32) as writer:
        for length in lengths:
            writer.add_document([list(range(start, start + length))])
            start += length
    return open_corpus(folder / "counting")


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


@pytest.mark.parametrize("case", range(60))
def test_samples_come_in_the_order_of_the_recipe(tmp_path: Path, case: int) -> None:
    random = np.random.RandomState(case)
    lengths = random.randint(0 if case % 3 == 0 else 1, 40, random.randint(3, 30)).tolist()
    sequence, samples, seed = (
        int(random.randint(1, 20)),
        int(random.randint(0, 200)),
        int(random.randint(1, 99)),
    )
    split = ["949,50,1", "80,20", "1", "50,25,25"][case % 4]
    corpus = corpus_of(tmp_path, lengths)
    bounds = split_bounds(split, len(lengths))[0]
    if sum(lengths[slice(*bounds)]) <= sequence:
        return
    got = open_split(corpus, split, "train", samples, sequence, seed)
    want = by_hand(lengths, bounds, samples, sequence, seed)
    assert len(got) == len(want) >= samples
    assert [got[k].tolist() for k in range(len(got))] == want


def test_the_cases_above_meet_a_last_epoch_shuffled_by_itself_and_one_that_is_not() -> None:
    lengths = np.array([10] * 10, np.int32)  # 100 tokens an epoch, 9 samples of 10 + 1
    few = make_order(lengths, (0, 10), samples=12, sequence=10, seed=1)
    many = make_order(lengths, (0, 10), samples=18, sequence=10, seed=1)
    assert sorted(few.documents[:10]) == list(range(10))
    assert sorted(few.shuffle[:9]) == list(range(9))
    assert sorted(many.shuffle[:9]) != list(range(9))


def test_splits_meet_without_gap_or_overlap() -> None:
    assert split_bounds("949,50,1", 79) == [(0, 75), (75, 79), (79, 79)]
    assert split_bounds("1,1,1", 10) == [(0, 3), (3, 7), (7, 10)]


def test_an_empty_split_says_how_many_documents_it_takes(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [50] * 5)
    with pytest.raises(
        DataError,
        match="valid part of split '949,50,1' has no tokens: there are 5 documents; it takes at least 10",
    ):
        open_split(corpus, "949,50,1", "valid", 8, 16, 1)
    with pytest.raises(DataError, match="its share is 0"):
        open_split(corpus, "1,0,0", "valid", 8, 16, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_global_batch_is_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    shares = [Share(micro_batch=2, global_batch=16, data_rank=rank, data=ranks) for rank in range(ranks)]
    got = sorted(k for share in shares for micro in share.samples_of(32) for k in micro)
    assert got == list(range(32, 48))
    assert all(len(share.samples_of(32)) == 8 // ranks for share in shares)


def test_batches_have_one_token_more_than_the_sequence(tmp_path: Path) -> None:
    samples = open_split(corpus_of(tmp_path, [30] * 10), "1", "train", 32, 7, 5)
    batches = Batches(samples, Share(micro_batch=2, global_batch=8))
    assert [micro.shape for micro in batches.at(8)] == [(2, 8)] * 4
    assert len(list(batches.first(3))) == 3
