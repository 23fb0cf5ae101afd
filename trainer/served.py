"""What a config may say, and no engine of this trainer does yet: refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.errors import Fault
from trainer.layout import Layout

if TYPE_CHECKING:
    from trainer.config import TrainConfig

GREATEST_ZERO = {"torch": 1, "deepspeed": 1}


def unserved(config: TrainConfig, layout: Layout) -> list[Fault]:
    """All that the chosen engine and the models cannot do; a plan may still count it."""
    return [*_of_layout(config, layout), *_of_model(config), *_of_loop(config)]


def serves(config: TrainConfig, layout: Layout) -> bool:
    """Whether a layout can be started."""
    return not any(_of_layout(config, layout))


def _of_layout(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    if layout.tensor > 1:
        what = f"is {layout.tensor}: no engine here divides matrices among ranks yet"
        yield Fault("train.parallel.tensor", what, "use 1; `clusterctl plan` counts it all the same")
    if layout.pipeline > 1:
        what = f"is {layout.pipeline}: no engine here has a pipeline yet"
        yield Fault("train.parallel.pipeline", what, "use 1; `clusterctl plan` counts it all the same")
    most = GREATEST_ZERO[config.engine]
    if config.zero > most:
        what = f"is {config.zero}; the {config.engine} engine does 0 to {most} so far"
        yield Fault("train.zero", what, f"use {most}, which divides the optimizer's state")
    if config.offload:
        yield Fault("train.offload", "no engine here moves the optimizer off the device yet", "leave it out")
    if config.recompute.mode != "none":
        what = f"is {config.recompute.mode}: the models keep every activation so far"
        yield Fault("train.recompute", what, "use none, and a smaller micro_batch")


def _of_model(config: TrainConfig) -> Iterator[Fault]:
    model = config.model
    if model.kind == "glm":
        yield Fault(
            "train.model.kind", "glm cannot be trained yet; its samples and its plan are there", "use gpt"
        )
        return
    for key in ("rotary", "swiglu"):
        if getattr(model, key):
            yield Fault(f"train.model.{key}", "the model does not do this yet", "leave it out")
    if model.groups != model.heads:
        yield Fault("train.model.query_groups", "the model does not do this yet", "leave it out")
    if model.positions not in (0, model.sequence):
        what = f"is {model.positions}: the model learns one for each token of a sample"
        yield Fault("train.model.positions", what, "leave it out")


def _of_loop(config: TrainConfig) -> Iterator[Fault]:
    if config.precision == "fp16" and config.hardware.kind not in ("", "cpu"):
        what = "fp16 is not supported yet: no engine here scales the loss"
        yield Fault("train.precision", what, "use bf16, which needs no loss scale")
    if config.batch_ramp.start:
        yield Fault("train.batch_ramp", "the loop has one batch size so far", "leave it out")
    if config.profile.repeat:
        yield Fault("train.profile", "the loop starts no profiler yet", "leave it out")
    if config.nan.name_layer:
        yield Fault("train.nan.name_layer", "the loop does not look for the layer yet", "leave it out")
