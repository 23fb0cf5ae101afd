"""How GLM's samples are cut and blanked: frozen, each field explained. Loads no NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.reader import setting

if TYPE_CHECKING:
    pass

# Sop, eop, ENC, the masks and the rest, above the vocabulary of the text.
SPECIAL_TOKENS = 9


@dataclass(frozen=True)
class Windows:
    """How a sample is cut from the documents."""

    short_chance: float = setting(0.02, least=0.0)
    """Chance that a sample is cut to a length in [32, sequence - 1)."""
    sentence_start: bool = setting(True)
    """Whether a window in a long document begins after a sentence's end, where one is near."""
    across_documents: bool = setting(True)
    """Whether a short document is followed by others until the sample is full."""


@dataclass(frozen=True)
class Infilling:
    """How often each mode is used, and how much it takes out."""

    words: float = setting(0.5, least=0.0)
    """Chance of short spans, [MASK] each; with `sentences` at most 1, what is left is [gMASK]'s."""
    sentences: float = setting(0.3, least=0.0)
    """Chance of whole sentences, [sMASK] each."""
    ratio: float = setting(0.15, above=0.0, below=1.0)
    """Part of a sample that these two take out."""
    span: float = setting(3.0, above=0.0)
    """Mean length of a short span (of a Poisson distribution cut to 1..39)."""
    one_span: float = setting(0.0, least=0.0)
    """Chance that `words` takes out one span alone."""
    least_rest: float = setting(0.25, least=0.0, below=1.0)
    """Least part of a sample that [gMASK] takes out."""
    inside: float = setting(0.5, least=0.0)
    """Chance that [gMASK] takes a sample's end without an end-of-piece, not a span from anywhere within."""
    hide: float = setting(0.1, least=0.0)
    """Chance that a token of a short span is hidden from what comes after it (dBLOCK)."""
    shuffle: bool = setting(True)
    """Whether spans are written in another order than they are read."""
