"""The data and the model of each fine-tuning task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import native
from trainer.config.data import DataIdentity
from trainer.config.layout import Piece
from trainer.config.train_config import TrainConfig
from trainer.config.tune import CLOZE
from trainer.model.adapter import adapt
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.model.recompute import Recompute
from trainer.parallel.tensor import ALONE, Parallel
from trainer.samples.dataset import Readable
from trainer.tune.chat_model import ChatModel
from trainer.tune.classify_model import LabelGLM, LabelGPT, add_classifier
from trainer.tune.cloze import TuneData
from trainer.tune.dpo_model import PreferenceModel
from trainer.tune.files import data_of
from trainer.tune.model import ClozeModel


class TaskData(Protocol):
    """The examples of a task."""

    @property
    def notes(self) -> Sequence[str]:
        """Return notes for the user."""

    def orders(self) -> Mapping[str, Readable]:
        """Return the samples to train on and the samples to evaluate on."""

    def identity(self) -> DataIdentity:
        """Return what a checkpoint records about the data."""


def open_task(config: TrainConfig) -> TaskData:
    """Return the examples of the config's task."""
    return TuneData(config) if config.tune.task in CLOZE else data_of(config)


def tuned_model(
    config: TrainConfig,
    ops: native.Choice,
    parallel: Parallel,
    recompute: Recompute,
    pieces: Sequence[Piece],
    context: Parallel = ALONE,
    drawn: bool = True,
) -> GLM | GPT:
    """Return this rank's part of the model that computes the loss of the config's task, with its adapters.

    `drawn`: draw the initial weights; otherwise matrices are 0 until they are drawn or loaded.
    """
    seed = config.seed if drawn else None
    task, is_glm = config.tune.task, config.model.kind == "glm"
    kinds: dict[str, Callable[..., GLM | GPT]] = {
        "chat": ChatModel,
        "dpo": PreferenceModel,
        "classify": LabelGLM if is_glm else LabelGPT,
    }
    kind = kinds.get(task, ClozeModel)
    stretch = {"context": context} if context.size > 1 else {}
    model: GLM | GPT = kind(
        config.model, ops, seed, parallel=parallel, recompute=recompute, pieces=pieces, **stretch
    )
    if isinstance(model, PreferenceModel):
        model.beta = config.tune.beta
    if config.tune.lora.rank:
        adapt(model, config.model, config.tune.lora, seed)
    if isinstance(model, (LabelGPT, LabelGLM)):
        # Add the head after the adapters, because the head is trained whole.
        add_classifier(model, config.model, len(config.tune.labels), seed)
    return model
