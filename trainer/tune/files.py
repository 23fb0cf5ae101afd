"""The files of each task that reads texts. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from trainer.config.train_config import TrainConfig
from trainer.tune.chat import ChatData
from trainer.tune.classify import LabelledData
from trainer.tune.pairs import PairData

KINDS: dict[str, type[ChatData]] = {"chat": ChatData, "dpo": PairData, "classify": LabelledData}


def data_of(config: TrainConfig, base: Path = Path()) -> ChatData:
    """Return the files of the config's task; paths are relative to `base`."""
    return KINDS[config.tune.task](config, base)
