"""Compute the steps of a training whose length is in tokens, samples or epochs. Uses NumPy only to count an epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer.config.amounts import length_of
from trainer.config.rules import layout_of
from trainer.config.train_config import TrainConfig
from trainer.errors import Fault

KEY = "train.length"


def with_steps(
    config: TrainConfig, world: int, given: Mapping[str, object], base: Path | None, faults: list[Fault]
) -> TrainConfig:
    """Return the config with `steps` computed from its length, rounded up; `given`: the keys that the job sets.

    `base`: the folder that paths are relative to; None if the corpora are not on this machine.
    """
    if not given.get("length"):
        return config
    faults[:] = [fault for fault in faults if fault.key != "train.steps" or "steps" in given]
    if "steps" in given:
        faults.append(Fault(KEY, "is given in addition to `steps`", "keep one of them"))
    if config.tune.task:
        faults.append(
            Fault(KEY, "is for a training on a corpus, but the job learns a task", "use tune: {epochs: ...}")
        )
    if not config.length or faults:
        return config
    value, unit = length_of(config.length)
    if unit == "epochs":
        samples = _epoch(config, base, faults) * value
    else:
        samples = value / (config.model.sequence if unit == "tokens" else 1)
    if config.global_batch is None:
        readers = layout_of(config, world)[0].readers
        if config.parallel.auto:
            readers = world // config.parallel.context
        config = replace(config, global_batch=config.micro_batch * readers)
    steps = value if unit == "steps" else config.batches.in_steps(samples)
    # Avoid that a rounding error, such as 3.0000000000000004, adds a step.
    return replace(config, steps=max(1, math.ceil(steps - 1e-9 * steps)), length="")


def _epoch(config: TrainConfig, base: Path | None, faults: list[Fault]) -> int:
    """Return the samples in one epoch of the corpora; 1 and a fault if they cannot be counted."""
    if config.model.kind == "glm":
        problem = "a GLM's epoch has no fixed length, because each epoch cuts different samples"
        faults.append(Fault(KEY, problem, "give tokens or samples"))
        return 1
    if base is None:
        problem = "an epoch cannot be counted, because the corpora are not on this machine"
        faults.append(Fault(KEY, problem, "give tokens or samples, or a local folder as the job's `data`"))
        return 1
    from trainer.plan.check_data import count_samples

    counted = count_samples(config, base)
    if not counted:
        faults.append(Fault(KEY, "an epoch cannot be counted: a corpus is missing or empty", "give tokens"))
    return max(1, counted)
