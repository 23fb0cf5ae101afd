"""What a config may say, and no engine of this trainer does yet: refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.errors import Fault
from trainer.layout import Layout

if TYPE_CHECKING:
    from trainer.config import TrainConfig


def unserved(config: TrainConfig, layout: Layout) -> list[Fault]:
    """All that the chosen engine and the loop cannot do; a plan may still count it."""
    return [*_of_layout(config, layout), *_of_loop(config)]


def serves(config: TrainConfig, layout: Layout) -> bool:
    """Whether a layout can be started."""
    return not any(_of_layout(config, layout))


def _of_layout(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    if config.zero >= 2 and layout.pipeline > 1 and config.engine == "torch":
        what = f"is {config.zero}: the stages of a pipeline hold their weights and gradients whole"
        yield Fault("train.zero", what, "use zero: 1, or no pipeline")


def _of_loop(config: TrainConfig) -> Iterator[Fault]:
    scaled = config.engine == "torch" and config.zero < 2
    if config.precision == "fp16" and config.hardware.kind not in ("", "cpu") and not scaled:
        what = "fp16 is torch's engine's, with zero 0 or 1: nothing else here scales the loss"
        yield Fault("train.precision", what, "use bf16, which needs no loss scale")
