"""Whether a job's tokenizer fits its model: looked at before anything starts. Loads the tokenizer, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config import TrainConfig
from trainer.errors import Fault, TrainerError
from trainer.glm_config import SPECIAL_TOKENS
from trainer.tokenizer import Tokenizer

FEW = 0.5  # of the model's ids: a tokenizer with fewer leaves most of the table untrained


def look_at_tokenizer(config: TrainConfig, base: Path) -> tuple[list[Fault], list[str]]:
    """What keeps a training from starting with the tokenizer that the job names, and what is surely not meant."""
    if not config.data.tokenizer:
        return [], []
    file = base / config.data.tokenizer
    if not file.exists():
        return [Fault("train.data.tokenizer", f"{file} does not exist")], []
    try:
        words = Tokenizer.load(file)
    except TrainerError as error:
        return [Fault("train.data.tokenizer", error.message, error.hint)], []
    return list(_faults(config, words)), list(_notes(config, words))


def _ids(config: TrainConfig, words: Tokenizer) -> int:
    """What a model must have for the tokenizer, GLM's own on top of it included."""
    laid_on = config.model.kind != "glm" or words.glm_ids() is not None
    return words.vocab if laid_on else words.vocab + SPECIAL_TOKENS


def _faults(config: TrainConfig, words: Tokenizer) -> Iterator[Fault]:
    needed, there = _ids(config, words), config.model.vocab
    if needed > there:
        own = " with GLM's own" if config.model.kind == "glm" else ""
        yield Fault("train.model.vocab", f"is {there}, but the tokenizer has {needed} ids{own}", f"use {needed}")


def _notes(config: TrainConfig, words: Tokenizer) -> Iterator[str]:
    needed, there = _ids(config, words), config.model.vocab
    if needed < FEW * there:
        yield f"the tokenizer has {needed} ids and the model {there}: most of its table is never trained (model.vocab)"
    if config.data.eod is not None and config.data.eod != words.eod:
        token = words.token_of(config.data.eod)
        yield (
            f"data.eod is {config.data.eod}, which the tokenizer has as {token!r}; "
            f"its own end of a document is {words.eod}"
        )
