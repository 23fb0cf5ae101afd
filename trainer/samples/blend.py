"""Mix several corpora into one stream of samples, in the order of Megatron-core's BlendedDataset.

Each next sample comes from the corpus that lags furthest behind its weight. The mix is not shuffled again,
because the samples of each corpus already are.

Also explains why a part of a corpus has too few samples, before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native.samples import sample_index
from trainer.samples.gpt import Samples, tokens_of
from trainer.splits import SPLITS, split_bounds, split_fractions

# Each corpus provides this much more than its share, so that rounding cannot exhaust it.
SURPLUS = 0.005


def normal(weights: Sequence[float]) -> list[float]:
    """Return the weights scaled to a sum of 1."""
    whole = np.asarray(weights, np.float64)
    shares: list[float] = (whole / np.sum(whole)).tolist()
    return shares


def sizes(weights: Sequence[float], samples: int, surplus: float = 0.0) -> list[int]:
    """Return how many samples each corpus must provide for `samples` in total; `weights` add up to 1."""
    return [math.ceil(math.ceil(samples * weight) * (1 + surplus)) for weight in weights]


@dataclass(frozen=True)
class BlendOrder:
    """For each sample of a blend: its corpus, and the number of the sample within that corpus."""

    corpus: NDArray[np.int16]
    sample: NDArray[np.int64]


def blend_order(weights: Sequence[float], size: int, available: Sequence[int] = ()) -> BlendOrder:
    """Return the first `size` samples of a blend; a corpus whose samples (`available`) are used up is skipped.

    Weights that are already normalized are normalized again, as Megatron-core does: this rounds them once
    more.
    """
    shares = np.asarray(normal(weights), np.float64)
    most = np.asarray(available, np.float64) if available else np.full(len(shares), np.inf)
    if sample_index.why_not():
        return BlendOrder(*plain_blend(shares, most, size))
    return BlendOrder(*sample_index.blend(shares, most, size))


def plain_blend(
    weights: NDArray[np.float64], available: NDArray[np.float64], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Compute `blend_order` in NumPy: the reference for the compiled code."""
    taken = np.zeros(len(weights), np.int64)
    corpus, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    for j in range(size):
        lag = weights * max(float(j), 1.0) - taken
        next_one = int(np.argmax(np.where(taken < available, lag, -np.inf)))
        corpus[j], sample[j] = next_one, taken[next_one]
        taken[next_one] += 1
    return corpus, sample


class Blend:
    """Samples of several corpora as one dataset."""

    def __init__(self, parts: Sequence[Samples], order: BlendOrder) -> None:
        self.parts, self.order = list(parts), order
        self.sequence = self.parts[0].sequence

    def __len__(self) -> int:
        return len(self.order.corpus)

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = self.read([k])[0]
        return tokens

    def read(self, ks: Any) -> NDArray[np.int64]:
        """Return the items `ks` as an array of shape (items, sequence + 1)."""
        ks = np.asarray(ks, np.int64)
        corpus, sample = self.order.corpus[ks], self.order.sample[ks]
        out = np.empty((len(ks), self.sequence + 1), np.int64)
        for number in np.unique(corpus):
            own = corpus == number
            out[own] = self.parts[number].read(sample[own])
        return out


# Search for the smallest sufficient number of documents up to this many documents.
FEW_ENOUGH_TO_COUNT = 100_000


def split_fault(
    prefix: str, lengths: NDArray[np.int32], split: str, which: str, sequence: int
) -> tuple[str, str] | None:
    """Return why `which` (train, valid or test) has not one whole sample, and a remedy; None if it has one."""
    sequences = len(lengths)
    tokens = tokens_of(lengths, split_bounds(split, sequences)[SPLITS.index(which)])
    if tokens > sequence:
        return None
    fractions = split_fractions(split)
    whole = fractions[SPLITS.index(which)] == 1
    part = f"{prefix}: " + ("it" if whole else f"the {which} part of split {split!r}")
    if tokens:
        problem = f"{part} has {tokens} tokens: less than one sample, which is {sequence + 1}"
        return problem, "use more documents, or a shorter sequence" + ("" if whole else ", or another split")
    problem = f"{part} has no tokens: there are {sequences} documents"
    remedy = "use more documents" if whole else 'use another split, for example "90,10,0", or more documents'
    if fractions[SPLITS.index(which)] == 0:
        return f"{problem}, and its share is 0", remedy
    needed = next((n for n in range(1, FEW_ENOUGH_TO_COUNT) if _has_part(split, which, n)), None)
    return (
        problem if needed is None or needed <= sequences else f"{problem}; it takes at least {needed}",
        remedy,
    )


def _has_part(split: str, which: str, sequences: int) -> bool:
    begin, end = split_bounds(split, sequences)[SPLITS.index(which)]
    return end > begin


def blend_fault(which: str, available: Sequence[int], needed: int) -> tuple[str, str]:
    """Return the error for corpora without weights, each read once, that have too few samples, and a
    remedy."""
    total = sum(available)
    problem = (
        f"the {len(available)} corpora for {which} have {total} samples in total, but {needed} are needed"
    )
    return problem, "give each corpus a weight: then it is read as often as needed"
