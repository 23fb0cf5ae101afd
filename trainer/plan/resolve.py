"""Read the `train:` part of a job into a checked config; `auto` keys are chosen by the planner.

Uses NumPy only to count an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import rules
from trainer.config.amounts import length_of
from trainer.config.data import data_faults
from trainer.config.deepspeed import placed_in_settings
from trainer.config.rules import glm_faults
from trainer.config.train_config import TrainConfig, read_train
from trainer.config.tune import TuneConfig
from trainer.errors import ConfigFaults, Fault
from trainer.plan.auto import Choice, choose
from trainer.plan.tune import tune_faults, with_amounts


def read_config(raw: object, world_size: int = 1) -> TrainConfig:
    """Return the checked config for `world_size` ranks, with defaults; raise ConfigFaults with all faults."""
    config, faults = try_config(raw, world_size)
    if faults:
        raise ConfigFaults(faults)
    return config


def try_config(raw: object, world_size: int) -> tuple[TrainConfig, list[Fault]]:
    """Return the config and its faults; use a config with faults only to find more faults."""
    planned = plan_config(raw, world_size)
    return planned.config, planned.faults


@dataclass(frozen=True)
class Planned:
    """A config, its faults, and the choice for `auto`."""

    config: TrainConfig
    faults: list[Fault]
    choice: Choice | None = None


def plan_config(raw: object, world_size: int, base: Path | None = Path()) -> Planned:
    """Return the config, its faults, and the choice for `auto`.

    `base`: the folder that paths of corpora are relative to; None if the corpora are not on this machine.
    """
    faults: list[Fault] = []
    if not isinstance(raw, Mapping):
        return Planned(TrainConfig(), [Fault("train", f"is {type(raw).__name__}; a mapping is needed")])
    config, rest = read_train(raw, faults)
    # What depends on the task cannot be checked without it.
    wrong_task = any(fault.is_of("tune.task") for fault in faults)
    tunes = wrong_task or config.tune != TuneConfig()
    if tunes:
        # Without a corpus, these keys follow from the examples.
        faults[:] = [fault for fault in faults if fault.key not in ("train.steps", "train.data")]
    config = with_steps(config, world_size, rest, base, faults)
    choice = None
    if config.parallel.auto and not faults:
        config, choice = choose(config, world_size, frozenset(rest))
    layout, wrong = rules.layout_of(config, world_size)
    if config.global_batch is None:
        config = replace(config, global_batch=config.micro_batch * layout.readers)
    if config.tune.task:
        config = with_amounts(config, frozenset(rest), faults)
    faults += wrong
    faults += rules.between_keys(config, layout, faults)
    if tunes and not config.tune.task and not wrong_task:
        known = "copa, choice, chat, dpo or classify"
        faults.append(Fault("train.tune.task", "missing", f"name one: {known}"))
    if config.tune.task:
        faults += tune_faults(config)
    elif not tunes:
        faults += data_faults(config.data, rest.get("data"), evaluates=config.eval.batches > 0)
    if not any(fault.is_of("model") for fault in faults):
        faults += glm_faults(config)
    return Planned(config, placed_in_settings(raw, faults), choice)


LENGTH = "train.length"


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
        faults.append(Fault(LENGTH, "is given in addition to `steps`", "keep one of them"))
    if config.tune.task:
        faults.append(
            Fault(
                LENGTH, "is for a training on a corpus, but the job learns a task", "use tune: {epochs: ...}"
            )
        )
    if not config.length or faults:
        return config
    value, unit = length_of(config.length)
    if unit == "epochs":
        samples = _epoch(config, base, faults) * value
    else:
        samples = value / (config.model.sequence if unit == "tokens" else 1)
    if config.global_batch is None:
        readers = rules.layout_of(config, world)[0].readers
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
        faults.append(Fault(LENGTH, problem, "give tokens or samples"))
        return 1
    if base is None:
        problem = "an epoch cannot be counted, because the corpora are not on this machine"
        faults.append(Fault(LENGTH, problem, "give tokens or samples, or a local folder as the job's `data`"))
        return 1
    from trainer.plan.check_data import count_samples

    counted = count_samples(config, base)
    if not counted:
        faults.append(
            Fault(LENGTH, "an epoch cannot be counted: a corpus is missing or empty", "give tokens")
        )
    return max(1, counted)
