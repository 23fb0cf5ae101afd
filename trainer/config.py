"""What to train: frozen, checked where it is built, every field explained. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.data_config import DataConfig, data_faults, listed_sources
from trainer.errors import ConfigFaults, Fault
from trainer.layout import Layout, nearest_batches
from trainer.models import SIZES, ModelConfig, sized
from trainer.settings import near, read_section, setting


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the schedule of its rate."""

    lr: float = setting(3e-4, above=0.0)
    """Highest learning rate."""
    min_lr: float = setting(0.0, least=0.0)
    """Rate at the last step."""
    weight_decay: float = setting(0.1, least=0.0)
    """Decay of matrices; biases and layer norms have none."""
    betas: tuple[float, float] = setting((0.9, 0.95), least=0.0, below=1.0)
    """Averaging of the gradient and of its square."""
    eps: float = setting(1e-8, above=0.0)
    """Added to the root of the squared average."""
    clip: float = setting(1.0, least=0.0)
    """Largest norm of the gradient of all parameters together; 0 leaves it as it is."""
    schedule: str = setting("cosine", choices=("cosine", "linear", "constant"))
    """How the rate goes from lr to min_lr after the warm-up."""
    warmup_steps: int = setting(0, least=0)
    """Steps in which the rate rises from 0 to lr."""


@dataclass(frozen=True)
class EvalConfig:
    """Validation: before the first step, after the last, and in between."""

    every: int = setting(0, least=0)
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    batches: int = setting(8, least=0)
    """Global batches an evaluation, always the same ones; 0 never evaluates."""


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints: after the last step, on SIGTERM, and in between."""

    every: int = setting(0, least=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = setting(2, least=1)
    """Newest checkpoints to keep; the only one that verifies is never removed."""


@dataclass(frozen=True)
class TrainConfig:
    """The `train:` part of a job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """A named size, a mapping of sizes, or a mapping with `name:` and what differs from it."""
    data: DataConfig = field(default_factory=DataConfig, metadata={"required": True})
    """The corpus."""
    steps: int = setting(1, least=1, required=True)
    """Optimizer steps in all, counted from the beginning of the training and not from a resume."""
    micro_batch: int = setting(8, least=1)
    """Samples that a rank computes at once."""
    global_batch: int | None = setting(None, least=1)
    """Samples a step over all ranks = micro_batch x data parallel x accumulation (1 if left out)."""
    precision: str = setting("fp32", choices=("fp32", "bf16"))
    """bf16 computes matrices in bf16 on cast copies; weights, gradients and optimizer stay fp32 in both."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    engine: str = setting("torch", choices=("torch", "deepspeed"))
    """Who moves gradients and state between ranks."""
    zero: int = setting(0, choices=(0, 1))
    """1 divides the optimizer's state among the data parallel ranks."""
    native: str | dict[str, str] = setting("auto")  # noqa: RUF009
    """Backend of the fused ops: auto, a name, or a name an op."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Validation."""
    save: SaveConfig = field(default_factory=SaveConfig)
    """Checkpoints."""
    log_every: int = setting(1, least=1)
    """Steps between lines on the console; metrics.jsonl has every step."""
    seed: int = setting(1234, least=0)
    """Seed of the initial weights and of dropout."""
    deterministic: bool = setting(True)
    """Refuse operations whose result changes from run to run."""
    resume: str = setting("auto")
    """auto: this run's newest checkpoint that verifies; never: from the start; else a checkpoint's folder."""

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["optimizer"]["betas"] = list(self.optimizer.betas)
        return document


def read_config(raw: object, world_size: int = 1) -> TrainConfig:
    """The checked config for so many ranks, defaults filled in; ConfigFaults has all that is wrong."""
    config, faults = try_config(raw, world_size)
    if faults:
        raise ConfigFaults(faults)
    return config


def try_config(raw: object, world_size: int) -> tuple[TrainConfig, list[Fault]]:
    """The config and its faults; with faults, it is only good for finding more of them."""
    faults: list[Fault] = []
    if not isinstance(raw, Mapping):
        return TrainConfig(), [Fault("train", f"is {type(raw).__name__}; a mapping is needed")]
    model = _read_model(raw.get("model"), faults)
    rest = {key: value for key, value in raw.items() if key != "model"}
    _explain_common_wrongs(rest, faults)
    if "data" in rest:
        rest["data"] = listed_sources(rest["data"])
    config = read_section(TrainConfig, rest, "train", faults)
    layout = Layout.of(world_size)
    if config.global_batch is None:
        config = replace(config, global_batch=config.micro_batch * layout.data)
    config = replace(config, model=model)
    faults += [
        *_model_faults(model),
        *_batch_faults(config, layout),
        *_schedule_faults(config),
        *data_faults(config.data, rest.get("data"), evaluates=config.eval.batches > 0),
        *_eod_faults(config),
    ]
    return config, faults


def _read_model(raw: object, faults: list[Fault]) -> ModelConfig:
    names = list(SIZES)
    if isinstance(raw, str):
        if raw not in SIZES:
            faults.append(Fault("train.model", f"there is no model {raw!r}", near(raw, names)))
        return SIZES.get(raw, ModelConfig())
    if not isinstance(raw, Mapping):
        what = "missing" if raw is None else f"is {raw!r}; a name or a mapping is needed"
        faults.append(Fault("train.model", what, f"one of {', '.join(names)}, or layers, hidden, heads, ..."))
        return ModelConfig()
    name = raw.get("name", "gpt-tiny")
    if name not in SIZES:
        faults.append(Fault("train.model.name", f"there is no model {name!r}", near(str(name), names)))
        name = "gpt-tiny"
    changes = {key: value for key, value in raw.items() if key != "name"}
    return read_section(ModelConfig, changes, "train.model", faults, start=sized(name))


def _explain_common_wrongs(raw: dict[Any, Any], faults: list[Fault]) -> None:
    """Replace values that have a better answer than `one of ...` by the default, with that answer."""
    if raw.get("precision") == "fp16":
        faults.append(
            Fault(
                "train.precision",
                "fp16 is not supported: neither torch on CPU nor DeepSpeed there has it",
                "use bf16, which needs no loss scale",
            )
        )
        raw["precision"] = "fp32"
    if raw.get("zero") in (2, 3) and not isinstance(raw.get("zero"), bool):
        faults.append(
            Fault(
                "train.zero",
                f"is {raw['zero']}; only 0 and 1 are supported",
                "use 1, which divides the optimizer's state",
            )
        )
        raw["zero"] = 0


def _model_faults(model: ModelConfig) -> list[Fault]:
    if model.hidden % model.heads == 0:
        return []
    fitting = [heads for heads in range(1, model.hidden + 1) if model.hidden % heads == 0]
    best = min(fitting, key=lambda heads: abs(heads - model.heads))
    return [
        Fault(
            "train.model.heads",
            f"hidden {model.hidden} does not divide by {model.heads} heads",
            f"use {best}",
        )
    ]


def _eod_faults(config: TrainConfig) -> list[Fault]:
    if config.data.eod is None or config.data.eod < config.model.vocab:
        return []
    what = f"{config.data.eod} is no token of a model of {config.model.vocab} (train.model.vocab)"
    return [Fault("train.data.eod", what, "use the tokenizer's own end of document")]


def _batch_faults(config: TrainConfig, layout: Layout) -> list[Fault]:
    assert config.global_batch is not None
    unit = config.micro_batch * layout.data
    if config.global_batch % unit == 0:
        return []
    below, above = nearest_batches(config.global_batch, config.micro_batch, layout.data)
    ranks = f"{layout.data} data parallel ranks"
    what = f"{config.global_batch} does not divide by micro_batch {config.micro_batch} x {ranks}"
    return [
        Fault("train.global_batch", what, f"use {above}" if below == above else f"use {below} or {above}")
    ]


def _schedule_faults(config: TrainConfig) -> list[Fault]:
    optimizer, faults = config.optimizer, []
    if optimizer.min_lr > optimizer.lr:
        faults.append(Fault("train.optimizer.min_lr", f"{optimizer.min_lr} is more than lr {optimizer.lr}"))
    if optimizer.warmup_steps >= config.steps and optimizer.warmup_steps > 0:
        what = f"{optimizer.warmup_steps} leaves nothing of {config.steps} steps"
        faults.append(Fault("train.optimizer.warmup_steps", what, f"use less than {config.steps}"))
    return faults
