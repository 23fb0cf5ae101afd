"""Find token ids that a corpus must not have; plan and ranks refuse them with the same message. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from trainer.config.glm import SPECIAL_TOKENS
from trainer.config.train_config import TrainConfig


def text_ids(config: TrainConfig, base: Path = Path()) -> int:
    """Return how many ids a text may have: those of the model, but for GLM only those below its special tokens.

    The path of the tokenizer is relative to `base`.
    """
    if config.model.kind != "glm":
        return config.model.vocab
    from trainer.samples.glm_batches import glm_tokens

    return glm_tokens(config, base).sop


def ids_fault(config: TrainConfig, binary: Path, largest: int, known: int) -> tuple[str, str] | None:
    """Return (what, remedy) if `largest`, an id in the file `binary`, is not one of the `known` first; else None."""
    if largest < known:
        return None
    glm = config.model.kind == "glm"
    own = f", and GLM's special tokens begin at {known}" if glm else ""
    problem = f"{binary}: has token id {largest}, but train.model.vocab is {config.model.vocab}{own}"
    vocab = largest + 1 + (SPECIAL_TOKENS if glm else 0)
    return problem, f"use vocab: {vocab}, or the tokenizer that made the data"
