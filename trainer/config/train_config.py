"""The `train:` part of a job as frozen, checked values with explanations. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from clusterctl.wire.fields import Reader, closest_match, setting
from trainer.config.amounts import BatchSizes, length_text
from trainer.config.chips import NAMED
from trainer.config.curriculum import CurriculumConfig
from trainer.config.data import DataConfig, listed_sources
from trainer.config.deepspeed import with_settings
from trainer.config.layout import Layout, Piece, pieces_of
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES, size_name, sized
from trainer.config.parts import (
    BatchRamp,
    EvalConfig,
    HardwareConfig,
    InitConfig,
    LossScaleConfig,
    NanConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RecomputeConfig,
    SaveConfig,
)
from trainer.config.tune import TuneConfig
from trainer.errors import Fault
from trainer.json_types import JsonObject

T = TypeVar("T")


@dataclass(frozen=True)
class TrainConfig:
    """The `train:` part of a job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """A named size, a mapping of sizes, or a mapping with `name:` and the keys that differ from it."""
    data: DataConfig = setting(factory=DataConfig, required=True)
    """The corpora."""
    tune: TuneConfig = field(default_factory=TuneConfig)
    """A task to learn instead of a corpus."""
    steps: int = setting(1, least=1, required=True)
    """Total number of optimizer steps, counted from the beginning of the training and not from a resume."""
    length: str = setting("", read=length_text)
    """In place of `steps`: `2.5B tokens`, `3M samples` or `2 epochs` of the corpora, rounded up to whole steps."""
    micro_batch: int = setting(8, least=1)
    """Samples that a rank computes at the same time (in one forward and backward pass)."""
    global_batch: int | None = setting(None, least=1)
    """Samples per step over all ranks = micro_batch x data parallel x accumulation (1 if left out)."""
    batch_ramp: BatchRamp = field(default_factory=BatchRamp)
    """Small batches first."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Short samples first."""
    precision: str = setting("fp32", choices=("fp32", "bf16", "fp16"))
    """Number type of matrices. With bf16 and fp16 the optimizer keeps weights and moments in fp32. Engine torch
    computes with a 16-bit copy of the weights, except for norms; engine deepspeed casts fp32 weights."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """For fp16: `dynamic`, a fixed number, or a mapping."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    engine: str = setting("torch", choices=("torch", "deepspeed"))
    """The library that runs the optimizer steps. `{deepspeed: ds_config.json}` names a file of DeepSpeed's settings,
    which are merged with the job's; `{deepspeed: {...}}` contains the settings."""
    deepspeed: str = setting("")
    """The settings of `engine: {deepspeed: ...}` that are passed to DeepSpeed, as JSON; not written by hand."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the ranks divide the model: a mapping, or `auto`, which tries every legal layout."""
    zero: int = setting(0, choices=(0, 1, 2, 3))
    """ZeRO stage, what the data parallel ranks divide: 1 the optimizer's state, 2 also gradients, 3 also weights."""
    offload: bool = setting(False)
    """Keep the optimizer's state in the node's memory, and let the CPU update it."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Recompute activations instead of storing them: none, full, selective, or a mapping."""
    native: str | dict[str, str] = setting("auto")
    """Backend of the fused ops: auto, a name, or a mapping of ops to names."""
    compile: str = setting("auto", choices=("auto", "graph", "blocks", "off"))
    """graph: capture the work of a micro-batch as a graph of the device and replay it, so that the device does not wait
    for Python. blocks: compile each block once per shape with torch.compile. off: run op by op. auto: on CUDA the first
    of these that the layout and the model allow, else off."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Validation."""
    save: SaveConfig = field(default_factory=SaveConfig)
    """Checkpoints."""
    nan: NanConfig = field(default_factory=NanConfig)
    """What happens after a loss that is not finite."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """torch's profiler with a schedule of steps."""
    tensorboard: bool = setting(False)
    """Write files for TensorBoard too, on rank 0; `clusterctl tensorboard RUN` writes them for any run."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """The devices for which the job is written: the name of their chip, or figures."""
    log_every: int = setting(1, least=1)
    """Steps between lines on the console; metrics.jsonl has every step."""
    seed: int = setting(1234, least=0)
    """Seed of the initial weights and of dropout."""
    deterministic: bool = setting(True)
    """Choose algorithms whose result does not change from run to run; on a GPU, refuse operations that have none."""
    resume: str = setting("auto")
    """auto: continue from this run's newest checkpoint that verifies. never: start at step 0. Else the folder of a
    checkpoint.
    """
    init: InitConfig = field(default_factory=InitConfig)
    """Initial weights: a source, or a mapping. A resume continues from the run's own checkpoints instead."""
    resume_other_data: bool = setting(False)
    """Resume even if the checkpoint was trained on other data or with another tokenizer."""

    def as_json(self) -> JsonObject:
        document = asdict(self)
        document["optimizer"]["betas"] = list(self.optimizer.betas)
        document["parallel"]["layers"] = list(self.parallel.layers)
        document["profile"]["ranks"] = list(self.profile.ranks)
        return document

    def stores_remainders(self, kind: str) -> bool:
        """Return whether masters of bf16 weights on a device of this kind are stored as remainders."""
        suits = self.precision == "bf16" and self.engine == "torch" and not (self.offload and kind != "cpu")
        wanted = self.optimizer.masters
        return suits and (wanted == "remainder" or (wanted == "auto" and kind == "cpu"))

    def recomputes_norms(self, kind: str) -> bool:
        """Return whether a device of this kind computes the results of norms again instead of storing them.

        On a CPU this takes 0.3 to 0.4 % of a step. DeepSpeed's ZeRO 3 has no weights of a norm while the gradient of
        the next matrix is computed, and adapters store their input.
        """
        return kind == "cpu" and self.engine == "torch" and not self.tune.lora.rank

    def captures(self, kind: str) -> bool:
        """Return whether a device of this kind replays each micro-batch as a captured graph."""
        wanted = kind == "cuda" if self.compile == "auto" else self.compile == "graph" and kind != "cpu"
        return wanted and not self.capture_fault

    def compiles_blocks(self, kind: str) -> bool:
        """Return whether a device of this kind runs the blocks as compiled code."""
        wanted = kind == "cuda" if self.compile == "auto" else self.compile == "blocks" and kind != "npu"
        return wanted and not self.captures(kind) and not self.block_fault

    @property
    def block_fault(self) -> str:
        """Return why a block of this training cannot be compiled, or ""."""
        parallel = self.parallel
        faults = {
            "engine is deepspeed": self.engine == "deepspeed",
            "tensor or context parallel ranks exchange within a block": max(parallel.tensor, parallel.context)
            > 1,
            f"zero is {self.zero}, which gathers the weights of a block": self.zero >= 2,
        }
        return next((fault for fault, is_given in faults.items() if is_given), "")

    @property
    def capture_fault(self) -> str:
        """Return why a micro-batch of this training cannot be captured as a graph, or ""."""
        parallel, drops = self.parallel, self.model.dropout or self.model.attention_dropout
        faults = {
            "engine is deepspeed": self.engine == "deepspeed",
            "tensor, pipeline or context parallel ranks exchange within a micro-batch": max(
                parallel.tensor, parallel.pipeline, parallel.context
            )
            > 1,
            f"zero is {self.zero}, which gathers weights within a micro-batch": self.zero >= 2,
            "samples of a GLM vary in length": self.model.kind == "glm",
            "samples of a task vary in length": bool(self.tune.task),
            "recomputation draws the masks of dropout again": bool(drops) and self.recompute.mode != "none",
        }
        return next((fault for fault, is_given in faults.items() if is_given), "")

    @cached_property
    def batches(self) -> BatchSizes:
        """Return the samples of each step."""
        ramp = self.batch_ramp
        return BatchSizes(self.global_batch or 1, ramp.start, ramp.increment, ramp.samples)

    def tokens(self, step: int) -> int:
        """Return the tokens of the samples of the first `step` steps."""
        sequence, grown = self.model.sequence, min(step, len(self._tokens_grown) - 1)
        rest = self.batches.consumed(step) - self.batches.consumed(grown)
        return self._tokens_grown[grown] + rest * sequence

    @cached_property
    def _tokens_grown(self) -> list[int]:
        """Return the tokens after each step of the curriculum."""
        found = [0]
        for step in range(1, (self.curriculum.steps if self.curriculum.start else 0) + 1):
            length = self.curriculum.length(step, self.model.sequence)
            found.append(found[-1] + self.batches.of(step) * length)
        return found

    def layout(self, world: int) -> Layout:
        """Return the layout of `world` ranks; raise ValueError if they cannot divide the work."""
        return Layout.of(world, self.parallel.tensor, self.parallel.pipeline, self.parallel.context)

    @property
    def stages(self) -> list[tuple[Piece, ...]]:
        """Return the pieces of each pipeline stage."""
        how, layers = self.parallel, self.model.layers
        return [
            pieces_of(layers, stage, how.pipeline, how.interleave, tuple(how.layers))
            for stage in range(how.pipeline)
        ]


def read_section(kind: type[T], raw: object, key: str, faults: list[Fault], start: T | None = None) -> T:
    """Return a `kind` of the mapping at `key`; adds its faults to the list."""

    def report(path: tuple[str | int, ...], problem: str, remedy: str) -> None:
        place = key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        faults.append(Fault(place, problem, remedy))

    return Reader(report).read(kind, raw, start=start)


def read_train(raw: Mapping[str, Any], faults: list[Fault]) -> tuple[TrainConfig, JsonObject]:
    """Return the config of a `train:` mapping and the mapping with short forms written out; adds to `faults`."""
    model = _read_model(raw.get("model"), faults)
    rest = {key: value for key, value in raw.items() if key != "model"}
    if isinstance(rest.get("engine"), Mapping):
        rest = with_settings(rest, faults)
    for key, shorten in SHORT.items():
        if isinstance(rest.get(key), (str, int, float)) and not isinstance(rest[key], bool):
            rest[key] = shorten(rest[key])
    if isinstance(rest.get("save"), Mapping) and type(rest["save"].get("keep")) is int:
        rest["save"] = {**rest["save"], "keep": {"last": rest["save"]["keep"]}}
    if "data" in rest:
        rest["data"] = listed_sources(rest["data"])
    config = replace(read_section(TrainConfig, rest, "train", faults), model=model)
    chip = NAMED.get(config.hardware.chip)
    if chip is not None and not config.hardware.kind:
        config = replace(config, hardware=replace(config.hardware, kind=chip.kind))
    return config, rest


def _short_loss_scale(given: object) -> object:
    if given == "dynamic":
        return {}
    return {"initial": given, "dynamic": False} if isinstance(given, (int, float)) else given


def _short_parallel(given: object) -> object:
    return {"auto": True} if given == "auto" else given


# Sections with a short form, which is a word or a number.
SHORT: dict[str, Callable[[object], object]] = {
    "parallel": _short_parallel,
    "recompute": lambda given: {"mode": given},
    "init": lambda given: {"source": given},
    "loss_scale": _short_loss_scale,
}


def _read_model(raw: object, faults: list[Fault]) -> ModelConfig:
    names = list(SIZES)
    if isinstance(raw, str):
        known = size_name(raw)
        if not known:
            faults.append(Fault("train.model", f"there is no model {raw!r}", closest_match(raw, names)))
        return SIZES.get(known, ModelConfig())
    if not isinstance(raw, Mapping):
        problem = "missing" if raw is None else f"is {raw!r}; a name or a mapping is needed"
        faults.append(
            Fault("train.model", problem, f"one of {', '.join(names)}, or layers, hidden, heads, ...")
        )
        return ModelConfig()
    given = raw.get("name", "gpt-tiny")
    name = size_name(given)
    if not name:
        faults.append(
            Fault("train.model.name", f"there is no model {given!r}", closest_match(str(given), names))
        )
        name = "gpt-tiny"
    changes = {key: value for key, value in raw.items() if key != "name"}
    return read_section(ModelConfig, changes, "train.model", faults, start=sized(name))
