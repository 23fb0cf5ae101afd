"""What a config may say, and no engine of this trainer does yet: refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.errors import Fault

if TYPE_CHECKING:
    from trainer.config import TrainConfig


def unserved(config: TrainConfig) -> Iterator[Fault]:
    """All that the chosen engine cannot do; a plan may still count it."""
    scaled = config.engine == "torch" and config.zero < 2
    if config.precision == "fp16" and config.hardware.kind not in ("", "cpu") and not scaled:
        what = "fp16 is torch's engine's, with zero 0 or 1: nothing else here scales the loss"
        yield Fault("train.precision", what, "use bf16, which needs no loss scale")


def serves(config: TrainConfig) -> bool:
    """Whether it can be started."""
    return not any(unserved(config))
