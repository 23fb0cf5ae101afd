"""What follows from the examples of a fine-tuning task: its steps and evaluations, and its faults. Loads no NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer.config.train_config import TrainConfig
from trainer.errors import Fault


def with_amounts(config: TrainConfig, given: frozenset[str], faults: list[Fault]) -> TrainConfig:
    """Return the config with the steps and evaluations that follow from the examples; `given` keys stay.

    A file that is not here cannot be counted: then `steps` is needed.
    """
    tune = config.tune
    batch = config.global_batch or 1
    train, valid = _rows(tune.train), _rows(tune.valid)
    if train is None:
        if "steps" not in given:
            problem = f"{tune.train or 'missing'}: cannot be read here, so its examples cannot be counted"
            faults.append(Fault("train.tune.train", problem, "name a file that is here, or give train.steps"))
        return config
    each = train * (2 if tune.task == "copa" and tune.mirror else 1)
    epoch = -(-each // batch)
    steps = config.steps if "steps" in given else max(1, -(-each * tune.epochs // batch))
    wanted = config.eval
    every = epoch if wanted.every == type(wanted)().every else wanted.every
    batches = -(-valid // batch) if valid else 0
    every = min(every, steps)
    save = config.save
    if "save" not in given:
        save = replace(save, every=every, keep=replace(save.keep, best=1))
    return replace(config, steps=steps, save=save, eval=replace(wanted, every=every, batches=batches))


def _rows(file: str) -> int | None:
    """Return the number of lines with content; None if the file cannot be read."""
    try:
        with Path(file).open("rb") as stream:
            return sum(1 for line in stream if line.strip())
    except OSError:
        return None


def tune_faults(config: TrainConfig) -> Iterator[Fault]:
    """Yield the faults of a fine-tuning."""
    tune = config.tune
    if not tune.train:
        yield Fault("train.tune.train", "missing", "name a file with examples")
    if config.model.kind != "glm":
        problem = f"{tune.task} fills in a mask, and the model is a {config.model.kind}"
        yield Fault("train.tune.task", problem, "use a GLM")
    if not config.data.tokenizer:
        yield Fault("train.data.tokenizer", "missing: the examples are texts", "name the model's tokenizer")
    if config.parallel.sequence:
        problem = "is set, and the rows of a task are too short to divide"
        yield Fault("train.parallel.sequence", problem, "leave it out")
    if tune.pattern > 1:
        yield Fault("train.tune.pattern", f"is {tune.pattern}", "use 0 or 1")
    if tune.patience and not tune.valid:
        yield Fault("train.tune.patience", "needs evaluations", "add train.tune.valid")
