"""Why a part of a corpus has no samples, in words and with what to do: known before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.data_config import split_fractions
from trainer.gpt_samples import SPLITS, split_bounds, tokens_of

FEW_ENOUGH_TO_COUNT = 100_000  # documents up to which the least number of them is searched


def split_fault(
    prefix: str, lengths: NDArray[np.int32], split: str, which: str, sequence: int
) -> tuple[str, str] | None:
    """Why `which` (train, valid or test) has not one whole sample, and a remedy; None where it has."""
    sequences = len(lengths)
    tokens = tokens_of(lengths, split_bounds(split, sequences)[SPLITS.index(which)])
    if tokens > sequence:
        return None
    fractions = split_fractions(split)
    whole = fractions[SPLITS.index(which)] == 1
    part = f"{prefix}: " + ("it" if whole else f"the {which} part of split {split!r}")
    if tokens:
        what = f"{part} has {tokens} tokens: less than one sample, which is {sequence + 1}"
        return what, "use more documents, or a shorter sequence" + ("" if whole else ", or another split")
    what = f"{part} has no tokens: there are {sequences} documents"
    remedy = "use more documents" if whole else 'use another split, for example "90,10,0", or more documents'
    if fractions[SPLITS.index(which)] == 0:
        return f"{what}, and its share is 0", remedy
    needed = next((n for n in range(1, FEW_ENOUGH_TO_COUNT) if _has_part(split, which, n)), None)
    return what if needed is None or needed <= sequences else f"{what}; it takes at least {needed}", remedy


def _has_part(split: str, which: str, sequences: int) -> bool:
    begin, end = split_bounds(split, sequences)[SPLITS.index(which)]
    return end > begin


def blend_fault(which: str, there: Sequence[int], asked: int) -> tuple[str, str]:
    """Corpora without weights, each read once, do not have so many samples."""
    what = (
        f"the {len(there)} corpora for {which} have {sum(there)} samples together, and {asked} are asked for"
    )
    return what, "give each corpus a weight: then they are read again as often as it takes"
