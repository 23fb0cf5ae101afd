"""How GLM's samples are cut and blanked: frozen, each field explained. Loads no NumPy."""

from __future__ import annotations

from dataclasses import dataclass

from clusterctl.wire.fields import setting

# Number of GLM's special tokens (sop, eop, ENC, the masks, ...), whose ids follow the vocabulary of the text.
SPECIAL_TOKENS = 9


@dataclass(frozen=True)
class Windows:
    """How a sample is cut from the documents."""

    short_chance: float = setting(0.02, least=0.0)
    """Probability that a sample is cut to a length in [32, sequence - 1)."""
    sentence_start: bool = setting(True)
    """Whether a window in a long document begins after the end of a sentence, if one is near."""
    across_documents: bool = setting(True)
    """Whether a short document is followed by others until the sample is full."""


@dataclass(frozen=True)
class Infilling:
    """How often each mode is used, and how many tokens it removes."""

    words: float = setting(0.5, least=0.0)
    """Probability of short spans, each replaced by [MASK]. The rest of 1 after `words` and `sentences` is that of
    [gMASK].
    """
    sentences: float = setting(0.3, least=0.0)
    """Probability of whole sentences, each replaced by [sMASK]."""
    ratio: float = setting(0.15, above=0.0, below=1.0)
    """Fraction of a sample that [MASK] and [sMASK] remove."""
    span: float = setting(3.0, above=0.0)
    """Mean length of a short span (of a Poisson distribution restricted to 1..39)."""
    one_span: float = setting(0.0, least=0.0)
    """Probability that `words` removes a single span."""
    least_rest: float = setting(0.25, least=0.0, below=1.0)
    """Smallest fraction of a sample that [gMASK] removes."""
    inside: float = setting(0.5, least=0.0)
    """Probability that [gMASK] removes the end of a sample, without an end-of-piece token, and not a span anywhere
    within it.
    """
    hide: float = setting(0.1, least=0.0)
    """Probability that a token of a short span is hidden from the tokens after it (dBLOCK)."""
    shuffle: bool = setting(True)
    """Whether the spans of a row are shuffled."""
