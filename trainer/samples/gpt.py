"""GPT samples in the order of Megatron-core's GPTDataset, index for index.

The sequences of a split, repeated over epochs and shuffled, form one stream of tokens. Sample i is the S +
1 tokens [i*S, i*S + S + 1), so that neighbours share one token; the samples are then shuffled too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native.samples import sample_index
from trainer.corpus.indexed import Corpus
from trainer.splits import Bounds

# Threads that look for the starts of samples: memory bandwidth limits them beyond this number.
MOST_THREADS = 8
INT32 = 2**31 - 1
# Megatron-core counts in uint32 below this number of samples.
WIDE_SHUFFLE = 2**32 - 2
# Number of items from which compiled code shuffles.
MOST_SHUFFLED = 2**32 - 1


def epochs_for(samples: int | None, sequence: int, tokens: int) -> int:
    """Return the smallest number of epochs that contains so many samples; 1 if no number is given."""
    return max(1, -(-((samples or 0) * sequence + 1) // tokens))


def last_epoch_apart(samples: int | None, sequence: int, tokens: int, epochs: int) -> int | None:
    """Return the number of samples before the last epoch if that epoch is shuffled separately, which
    happens when less than 80 % of it is needed; else None."""
    if epochs == 1 or samples is None:
        return None
    before = ((epochs - 1) * tokens - 1) // sequence
    a_whole = (tokens - 1) // sequence
    return before if samples - before < int(0.80 * a_whole) else None


@dataclass(frozen=True)
class Recipe:
    """All that an order depends on, except the lengths of the sequences."""

    bounds: Bounds
    sequence: int
    seed: int
    epochs: int
    # Samples before a last epoch that is shuffled separately.
    before: int | None

    @classmethod
    def of(
        cls, lengths: NDArray[np.int32], bounds: Bounds, samples: int | None, sequence: int, seed: int
    ) -> Recipe:
        """Return the recipe for at least `samples` samples, or for one epoch if no number is given."""
        tokens = tokens_of(lengths, bounds)
        epochs = epochs_for(samples, sequence, tokens)
        return cls(bounds, sequence, seed, epochs, last_epoch_apart(samples, sequence, tokens, epochs))


def tokens_of(lengths: NDArray[np.int32], bounds: Bounds) -> int:
    """Return the number of tokens of the sequences [bounds)."""
    return int(lengths[bounds[0] : bounds[1]].sum(dtype=np.int64))


@dataclass(frozen=True)
class Order:
    """The three indices of a split."""

    # Sequences in the order of the stream.
    documents: NDArray[np.int32]
    samples: NDArray[Any]  # (samples + 1, 2) of int32 or int64: place in `documents`, token within it
    # K-th item -> sample.
    shuffle: NDArray[Any]

    def __len__(self) -> int:
        return len(self.shuffle)


def follow(recipe: Recipe, lengths: NDArray[np.int32]) -> Order:
    """Return the order that a recipe describes; the sequences must contain at least one token."""
    random = np.random.RandomState(recipe.seed)
    own = np.arange(*recipe.bounds, dtype=np.int32)
    apart = None if recipe.before is None else (recipe.epochs - 1) * len(own)
    documents = _shuffled(random, np.tile(own, recipe.epochs), apart)
    count = (recipe.epochs * tokens_of(lengths, recipe.bounds) - 1) // recipe.sequence
    starts = sample_starts(lengths, documents, recipe.sequence, count)
    dtype = np.uint32 if count < WIDE_SHUFFLE - 1 else np.int64
    return Order(documents, starts, _shuffled(random, np.arange(count, dtype=dtype), recipe.before))


def _shuffled(random: np.random.RandomState, items: NDArray[Any], cut: int | None) -> NDArray[Any]:
    """Shuffle in place: everything, or the parts before and after `cut` separately."""
    parts = [items] if cut is None else [items[:cut], items[cut:]]
    shuffle = (
        sample_index.shuffle if not sample_index.why_not() and len(items) <= MOST_SHUFFLED else _plain_shuffle
    )
    for part in parts:
        shuffle(part, random)
    return items


def _plain_shuffle(items: NDArray[Any], random: np.random.RandomState) -> None:
    random.shuffle(items)


def sample_starts(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], sequence: int, count: int
) -> NDArray[Any]:
    """Return where each of `count` samples starts, (position, token within it), and one more row where the
    last one ends."""
    if sample_index.why_not():
        return plain_starts(lengths, documents, sequence, count)
    out = np.empty((count + 1, 2), _row_type(documents))
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    sample_index.sample_starts(lengths, documents, sequence, out, threads)
    return out


def plain_starts(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], sequence: int, count: int
) -> NDArray[Any]:
    """Compute `sample_starts` in NumPy: the reference for the compiled code."""
    own = lengths[documents]
    ends = np.cumsum(own, dtype=np.int64)
    at = np.arange(count + 1, dtype=np.int64) * sequence
    index = np.searchsorted(ends, at, side="right")
    starts = np.stack([index, at - (ends[index] - own[index])], axis=1).astype(_row_type(documents))
    # Also correct when the first documents are empty.
    starts[0] = 0
    return starts


def _row_type(documents: NDArray[np.int32]) -> Any:
    return np.int32 if len(documents) <= INT32 else np.int64


class Samples:
    """One split of one corpus as samples of sequence + 1 tokens."""

    def __init__(self, corpus: Corpus, order: Order, sequence: int) -> None:
        self.corpus, self.order, self.sequence = corpus, order, sequence
        self._compiled = None if sample_index.why_not() else self._reader()

    def _reader(self) -> sample_index.Reader:
        corpus, order = self.corpus, self.order
        return sample_index.Reader(
            corpus.tokens, corpus.offsets, corpus.lengths, order.documents, order.samples
        )

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = self.read([k])[0]
        return tokens

    def read(self, ks: Any) -> NDArray[np.int64]:
        """Return the items `ks` as an array of shape (items, sequence + 1)."""
        numbers = self.order.shuffle[np.asarray(ks, np.int64)].astype(np.int64)
        if self._compiled is not None:
            return self._compiled.read(numbers, self.sequence + 1)
        return np.stack([self._read_one(int(number)) for number in numbers])

    def _read_one(self, i: int) -> NDArray[np.int64]:
        (place, begin), (last_place, end) = self.order.samples[i].tolist(), self.order.samples[i + 1].tolist()
        parts = []
        for at in range(place, last_place + 1):
            number = self.order.documents[at]
            start = self.corpus.offsets[number]
            stop = start + (end + 1 if at == last_place else self.corpus.lengths[number])
            parts.append(self.corpus.tokens[start + (begin if at == place else 0) : stop])
        return np.concatenate(parts).astype(np.int64)
