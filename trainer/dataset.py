"""Samples in the order of Megatron-core's GPTDataset, and batches whose place is a number of samples.

A split's sequences, repeated over epochs and shuffled, form one stream of tokens; sample i is its
S + 1 tokens [i*S, i*S + S + 1), so that neighbours share one token; the samples are shuffled in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import split_fractions
from trainer.corpus import Corpus
from trainer.errors import DataError

SPLITS = ("train", "valid", "test")


def split_bounds(split: str, sequences: int) -> list[tuple[int, int]]:
    """The half-open ranges of the sequences of train, valid and test."""
    edges, total = [0], 0.0
    for fraction in split_fractions(split):
        total += fraction
        edges.append(round(total * float(sequences)))
    return list(pairwise(edges))


def epochs_for(samples: int, sequence: int, tokens: int) -> int:
    """The fewest epochs with so many samples in them; one where none are asked for."""
    return max(1, -(-(samples * sequence + 1) // tokens))


def last_epoch_apart(samples: int, sequence: int, tokens: int, epochs: int) -> int | None:
    """Samples before the last epoch, when it is shuffled by itself because under 80 % of it is needed."""
    if epochs == 1:
        return None
    before = ((epochs - 1) * tokens - 1) // sequence
    a_whole = (tokens - 1) // sequence
    return before if samples - before < int(0.80 * a_whole) else None


@dataclass(frozen=True)
class Order:
    """The three indices of a split."""

    documents: NDArray[np.int32]  # sequences in the stream's order
    samples: NDArray[np.int64]  # (samples + 1, 2): place in `documents`, token within it
    shuffle: NDArray[Any]  # k-th item -> sample

    def __len__(self) -> int:
        return len(self.shuffle)


def make_order(
    lengths: NDArray[np.int32], bounds: tuple[int, int], samples: int, sequence: int, seed: int
) -> Order:
    """The order of at least `samples` samples over the sequences [bounds)."""
    own = np.arange(*bounds, dtype=np.int32)
    tokens = int(lengths[own].sum(dtype=np.int64))
    epochs = epochs_for(samples, sequence, tokens)
    before = last_epoch_apart(samples, sequence, tokens, epochs)
    random = np.random.RandomState(seed)
    documents = _shuffled(random, np.tile(own, epochs), None if before is None else (epochs - 1) * len(own))
    starts = sample_starts(lengths[documents], sequence)
    count = len(starts) - 1
    dtype = np.uint32 if count < 2**32 - 2 else np.int64
    return Order(documents, starts, _shuffled(random, np.arange(count, dtype=dtype), before))


def _shuffled(random: np.random.RandomState, items: NDArray[Any], cut: int | None) -> NDArray[Any]:
    """Shuffle in place: as a whole, or the parts before and after `cut` each by itself."""
    parts = [items] if cut is None else [items[:cut], items[cut:]]
    for part in parts:
        random.shuffle(part)
    return items


def sample_starts(lengths: NDArray[np.int32], sequence: int) -> NDArray[np.int64]:
    """Where each sample begins, (place, token within), and one row more where the last one ends."""
    ends = np.cumsum(lengths, dtype=np.int64)
    count = (int(ends[-1]) - 1) // sequence
    at = np.arange(count + 1, dtype=np.int64) * sequence
    place = np.searchsorted(ends, at, side="right")
    return np.stack([place, at - (ends[place] - lengths[place])], axis=1)


class Samples:
    """One split as samples of sequence + 1 tokens."""

    def __init__(self, corpus: Corpus, order: Order, sequence: int) -> None:
        self.corpus, self.order, self.sequence = corpus, order, sequence

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        i = int(self.order.shuffle[k])
        (place, begin), (last_place, end) = self.order.samples[i], self.order.samples[i + 1]
        parts = []
        for at in range(place, last_place + 1):
            number = self.order.documents[at]
            start = self.corpus.offsets[number]
            stop = start + (end + 1 if at == last_place else self.corpus.lengths[number])
            parts.append(self.corpus.tokens[start + (begin if at == place else 0) : stop])
        return np.concatenate(parts).astype(np.int64)


@dataclass(frozen=True)
class Share:
    """What of every global batch is this rank's: place `data_rank` among `data` ranks."""

    micro_batch: int
    global_batch: int
    data_rank: int = 0
    data: int = 1

    def samples_of(self, consumed: int) -> list[list[int]]:
        """The items of each of this rank's micro-batches, for the global batch after `consumed` samples."""
        unit = self.micro_batch * self.data
        mine = self.data_rank * self.micro_batch
        return [
            list(range(start + mine, start + mine + self.micro_batch))
            for start in range(consumed, consumed + self.global_batch, unit)
        ]


class Batches:
    """A split's global batches by place. The order depends on the samples consumed and on nothing else."""

    def __init__(self, samples: Samples, share: Share) -> None:
        self.samples, self.share = samples, share

    def at(self, consumed: int) -> list[NDArray[np.int64]]:
        """This rank's micro-batches, each (micro_batch, sequence + 1), of the batch at `consumed` samples."""
        return [np.stack([self.samples[k] for k in ks]) for ks in self.share.samples_of(consumed)]

    def first(self, batches: int) -> Iterator[list[NDArray[np.int64]]]:
        """The first so many global batches."""
        for number in range(batches):
            yield self.at(number * self.share.global_batch)


def open_split(corpus: Corpus, split: str, which: str, samples: int, sequence: int, seed: int) -> Samples:
    """train, valid or test of a corpus with at least `samples` samples; an empty one is explained."""
    sequences = len(corpus.lengths)
    bounds = split_bounds(split, sequences)[SPLITS.index(which)]
    tokens = int(corpus.lengths[bounds[0] : bounds[1]].sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(
            _empty_split(corpus, split, which), 'use another split, for example "90,10,0", or more documents'
        )
    return Samples(corpus, make_order(corpus.lengths, bounds, samples, sequence, seed), sequence)


def _empty_split(corpus: Corpus, split: str, which: str) -> str:
    sequences = len(corpus.lengths)
    fraction = split_fractions(split)[SPLITS.index(which)]
    what = (
        f"{corpus.prefix}: the {which} part of split {split!r} has no tokens: there are {sequences} documents"
    )
    if fraction == 0:
        return f"{what}, and its share is 0"
    needed = next((n for n in range(1, 100_000) if _has_part(split, which, n)), None)
    return what if needed is None or needed <= sequences else f"{what}; it takes at least {needed}"


def _has_part(split: str, which: str, sequences: int) -> bool:
    begin, end = split_bounds(split, sequences)[SPLITS.index(which)]
    return end > begin
