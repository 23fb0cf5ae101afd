"""The files of each task that reads texts. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from trainer.config.train_config import TrainConfig
from trainer.config.tune import CLOZE
from trainer.evaluate.choice import read_choices
from trainer.evaluate.copa import read_questions
from trainer.tune.chat import ChatData
from trainer.tune.classify import LabelledData
from trainer.tune.pairs import PairData

KINDS: dict[str, type[ChatData]] = {"chat": ChatData, "dpo": PairData, "classify": LabelledData}


def check_file(config: TrainConfig, base: Path, name: str) -> None:
    """Raise an error that lists the faulty lines of a file, if there are any."""
    if config.tune.task in CLOZE:
        (read_questions if config.tune.task == "copa" else read_choices)(base / name)
    else:
        data_of(config, base).samples(name)


def data_of(config: TrainConfig, base: Path = Path()) -> ChatData:
    """Return the files of the config's task; `base`: the folder that paths are relative to."""
    return KINDS[config.tune.task](config, base)
