"""Read the examples of a fine-tuning task: count its steps and evaluations, and find its faults. Imports no NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer.config.lora import lora_faults
from trainer.config.train_config import TrainConfig
from trainer.config.tune import CLOZE, TuneConfig
from trainer.errors import Fault, TrainerError


def with_amounts(config: TrainConfig, given: frozenset[str], faults: list[Fault]) -> TrainConfig:
    """Return the config with steps and evaluations computed from the number of examples; `given` keys are not changed.

    The examples of a file on another machine cannot be counted: then `steps` is required.
    """
    tune = config.tune
    batch = config.global_batch or 1
    train, valid = _samples(config, tune.train), _samples(config, tune.valid)
    if train is None:
        if "steps" not in given:
            problem = f"{tune.train or 'missing'}: cannot be read here, so its examples cannot be counted"
            faults.append(
                Fault("train.tune.train", problem, "name a file on this machine, or give train.steps")
            )
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


def _samples(config: TrainConfig, file: str) -> int | None:
    """Return the number of samples in a file; None if it cannot be read."""
    tune = config.tune
    if file and Path(file).is_file() and (tune.packing or tune.too_long == "leave_out"):
        # The number depends on the lengths of the examples in tokens.
        try:
            from trainer.tune.files import data_of

            return data_of(config).samples(file)
        except (ImportError, TrainerError):
            return None
    return _rows(file)


def _rows(file: str) -> int | None:
    """Return the number of lines that are not empty; None if the file cannot be read."""
    try:
        with Path(file).open("rb") as stream:
            return sum(1 for line in stream if line.strip())
    except OSError:
        return None


def tune_faults(config: TrainConfig) -> Iterator[Fault]:
    """Yield the faults of a fine-tuning config."""
    tune = config.tune
    if not tune.train:
        yield Fault("train.tune.train", "missing", "name a file with examples")
    if tune.task in CLOZE and config.model.kind != "glm":
        problem = f"{tune.task} fills in a mask, but the model is a {config.model.kind}"
        yield Fault("train.tune.task", problem, "use a GLM")
    if tune.task in ("chat", "dpo") and config.model.kind == "glm":
        yield Fault(
            "train.tune.task", f"a GLM fills in blanks, but {tune.task} continues a text", "use a GPT"
        )
    if tune.task == "classify" and len(set(tune.labels)) < max(2, len(tune.labels)):
        yield Fault("train.tune.labels", f"is {list(tune.labels)}", "give two labels or more, each once")
    if tune.task == "dpo" and tune.too_long == "leave_out":
        yield Fault("train.tune.too_long", "is leave_out, but a pair cannot be divided", "use refuse or cut")
    if tune.task == "classify" and config.engine == "deepspeed":
        yield Fault("train.engine", "engine deepspeed does not support classify", "use engine: torch")
    if not config.data.tokenizer:
        yield Fault("train.data.tokenizer", "missing: the examples are texts", "name the model's tokenizer")
    if config.parallel.sequence and tune.task != "chat":
        problem = "is set, but the rows of a task are too short to divide"
        yield Fault("train.parallel.sequence", problem, "leave it out")
    if tune.pattern > 1:
        yield Fault("train.tune.pattern", f"is {tune.pattern}", "use 0 or 1")
    if tune.patience and not tune.valid:
        yield Fault("train.tune.patience", "needs evaluations", "add train.tune.valid")
    yield from lora_faults(config.model, tune.lora)
    if tune.lora.rank and not config.init.source:
        yield Fault("train.init.source", "missing: adapters need base weights", "name the base weights")
    if tune.lora.rank and config.init.extend_vocabulary:
        problem = "adapters do not train the token table, so its new rows would never be learned"
        yield Fault("train.init.extend_vocabulary", problem, "leave it out")
    for key, tasks in OF_TASKS.items():
        if tune.task not in tasks and getattr(tune, key) != getattr(TuneConfig(), key):
            yield Fault(
                f"train.tune.{key}", f"is for {' and '.join(tasks)}, not for {tune.task}", "leave it out"
            )


# Keys that only some tasks have.
OF_TASKS = {
    "template": ("chat", "dpo"),
    "packing": ("chat",),
    "too_long": ("chat", "dpo", "classify"),
    "beta": ("dpo",),
    "labels": ("classify",),
    "fields": ("classify",),
    "pattern": ("copa",),
    "mirror": ("copa",),
}


def check_examples(config: TrainConfig, base: Path) -> tuple[list[Fault], list[str]]:
    """Return the faults of the examples (paths relative to `base`), and notes about files on other machines."""
    tune = config.tune
    absent = [
        name
        for name in (tune.train, tune.valid, tune.template, config.data.tokenizer)
        if name and not (base / name).exists()
    ]
    if absent:
        return [], [f"train.tune: {', '.join(absent)} is not on this machine; the ranks check the examples"]
    try:
        from trainer.tune.files import check_file, data_of
    except ImportError as error:
        return [], [f"train.tune: not checked here, since {error.name} is not installed; the ranks check it"]
    faults = list[Fault]()
    try:
        if tune.task not in CLOZE:
            data_of(config, base)
    except TrainerError as error:
        of_template = tune.template and error.message.startswith(str(base / tune.template))
        key = "train.tune.template" if of_template else "train.data.tokenizer"
        return [Fault(key, error.message, error.hint)], []
    for key in ("train", "valid"):
        name = getattr(tune, key)
        try:
            if name:
                check_file(config, base, name)
        except TrainerError as error:
            faults.append(Fault(f"train.tune.{key}", error.message, error.hint))
    return faults, []


def sample_length(config: TrainConfig, base: Path) -> float | None:
    """Return the mean number of tokens of a task's samples; None if it is `model.sequence` or is not known here."""
    tune = config.tune
    if tune.task in CLOZE or tune.packing or not (base / tune.train).is_file():
        return None
    try:
        from trainer.tune.files import data_of

        examples = data_of(config, base).examples(tune.train)
    except (ImportError, TrainerError):
        return None
    return tune.rows * float(examples.lengths.mean())
