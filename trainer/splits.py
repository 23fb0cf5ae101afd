"""Divide a corpus into train, valid and test by shares, with the numbers of Megatron-core on every Python."""

from __future__ import annotations

import math
from itertools import pairwise

SPLITS = ("train", "valid", "test")
Bounds = tuple[int, int]


def split_fractions(text: str) -> list[float]:
    """Return three fractions that add up to 1, from text like `949,50,1`."""
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers") from None
    # From Python 3.12 on, `sum` compensates rounding errors. Megatron-core adds in order, by NumPy.
    total = 0.0
    for part in parts:
        total += part
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < total < math.inf:
        raise ValueError(f"{text!r} is not one to three numbers, none negative, not all zero")
    return [part / total for part in (*parts, 0.0, 0.0)[:3]]


def split_bounds(split: str, sequences: int) -> list[Bounds]:
    """Return the half-open ranges of the sequences of train, valid and test."""
    edges, total = [0], 0.0
    for fraction in split_fractions(split):
        total += fraction
        edges.append(round(total * float(sequences)))
    return list(pairwise(edges))
