"""How GLM's samples are cut and blanked: frozen, each field explained. Loads no NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import Fault
from trainer.settings import setting

if TYPE_CHECKING:
    from trainer.config import TrainConfig

SPECIAL_TOKENS = 9  # sop, eop, ENC, the masks and the rest, above the vocabulary of the text


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


def glm_faults(config: TrainConfig) -> Iterator[Fault]:
    """What of a `data:` part does not go with the kind of model."""
    data = config.data
    if config.model.kind != "glm":
        for key, kind in (("windows", Windows), ("infilling", Infilling)):
            if getattr(data, key) != kind():
                what = f"is GLM's, and the model is a {config.model.kind}"
                yield Fault(f"train.data.{key}", what, "leave it out, or use a glm model")
        return
    yield from _chance_faults(data.windows, data.infilling)
    if not data.tokenizer and data.eod is None:
        what = "missing: GLM needs the end of a document, and with a tokenizer those of sentences too"
        yield Fault("train.data.tokenizer", what, "add `tokenizer:`, or at least `eod:`")
    for key in ("mask_eod_loss", "reset_positions", "reset_attention"):
        if getattr(data, key):
            what = "is GPT's: of GLM's samples only blanks are predicted, and each opens with ENC"
            yield Fault(f"train.data.{key}", what, "leave it out")
    text = config.model.vocab - SPECIAL_TOKENS
    if text < 1:
        what = f"{config.model.vocab} leaves no token beside GLM's {SPECIAL_TOKENS} own"
        yield Fault("train.model.vocab", what, f"use the tokenizer's + {SPECIAL_TOKENS}")
    elif data.eod is not None and text <= data.eod < config.model.vocab:
        what = f"{data.eod} is one of GLM's own tokens, the last {SPECIAL_TOKENS} of {config.model.vocab}"
        yield Fault("train.data.eod", what, "use the tokenizer's end of document")


def _chance_faults(windows: Windows, infilling: Infilling) -> Iterator[Fault]:
    chances = {"windows.short_chance": windows.short_chance}
    for key in ("words", "sentences", "one_span", "inside", "hide"):
        chances[f"infilling.{key}"] = getattr(infilling, key)
    for key, chance in chances.items():
        if chance > 1:
            yield Fault(f"train.data.{key}", f"is {chance}; a chance is at most 1")
    if infilling.words + infilling.sentences > 1:
        what = f"words {infilling.words} and sentences {infilling.sentences} are more than 1 together"
        yield Fault("train.data.infilling", what, "leave the rest to [gMASK]")
