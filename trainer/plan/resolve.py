"""Read the `train:` part of a job into a checked config; `auto` keys are chosen by the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import rules
from trainer.config.data import data_faults
from trainer.config.deepspeed import placed_in_settings
from trainer.config.rules import glm_faults
from trainer.config.train_config import TrainConfig, read_train
from trainer.config.tune import TuneConfig
from trainer.errors import ConfigFaults, Fault
from trainer.plan.auto import Choice, choose
from trainer.plan.length import with_steps
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
