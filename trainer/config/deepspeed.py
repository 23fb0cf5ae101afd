"""The settings of a DeepSpeed configuration: those that are also keys of the job, those that are passed to DeepSpeed
unchanged, and those that are refused, because the trainer would not follow them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterctl.wire.fields import closest_match
from trainer.errors import Fault
from trainer.json_types import JsonObject

KEY = "train.engine.deepspeed"
# Hugging Face's value for "as the job says".
AUTO = "auto"


@dataclass(frozen=True)
class Shared:
    """A setting that is also a key of the job."""

    path: str
    key: str
    convert: Callable[[Any], object] = lambda value: value


SHARED = (
    Shared("train_batch_size", "global_batch"),
    Shared("train_micro_batch_size_per_gpu", "micro_batch"),
    Shared("gradient_clipping", "optimizer.clip"),
    Shared("zero_optimization.stage", "zero"),
    Shared("optimizer.params.lr", "optimizer.lr"),
    Shared("optimizer.params.betas", "optimizer.betas"),
    Shared("optimizer.params.eps", "optimizer.eps"),
    Shared("optimizer.params.weight_decay", "optimizer.weight_decay"),
)
SCALES = (
    Shared("fp16.initial_scale_power", "loss_scale.initial", lambda power: 2.0**power),
    Shared("fp16.loss_scale_window", "loss_scale.window"),
    Shared("fp16.hysteresis", "loss_scale.hysteresis"),
    Shared("fp16.min_loss_scale", "loss_scale.least"),
)
# Sections for parts that DeepSpeed can move off the device.
OFFLOADED = ("offload_optimizer", "offload_param")
# Sections and values that are passed to DeepSpeed unchanged.
PASSED = frozenset(
    (
        "zero_optimization",
        "comms_logger",
        "flops_profiler",
        "aio",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "communication_data_type",
        "disable_allgather",
        "gradient_accumulation_steps",
    )
)
# Settings whose values follow from others, or have no effect here.
UNUSED = frozenset(
    (
        "steps_per_print",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "prescale_gradients",
        "gradient_predivide_factor",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_clipping",
    )
)
REFUSED = {
    "scheduler": "the job has the schedule: optimizer: {schedule, warmup, decay, min_lr}",
    "amp": "use precision: bf16 or fp16",
    "activation_checkpointing": "use recompute",
    "pipeline": "use parallel: {pipeline: ...}",
    "sparse_attention": "use model: {window: ...}",
    "curriculum_learning": "the trainer draws the samples, not DeepSpeed",
    "data_efficiency": "the trainer draws the samples, not DeepSpeed",
    "elasticity": "a run restarts on fewer nodes by restart: {min_nodes: ...}",
    "autotuning": "use parallel: auto",
    "compression_training": "weights are trained as they are",
    "tensorboard": "use tensorboard: true",
    "wandb": "use `clusterctl report`",
    "csv_monitor": "metrics.jsonl of the run has every step",
    "hybrid_engine": "use `clusterctl generate`",
    "checkpoint": "use save",
    "progressive_layer_drop": "every layer is trained",
}
OPTIMIZERS = ("Adam", "AdamW")


def settings_of(text: str) -> Mapping[str, Any]:
    """Return the settings that are passed to DeepSpeed unchanged."""
    found: Mapping[str, Any] = json.loads(text) if text else {}
    return found


def parts_on_disk(given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of the parts that DeepSpeed keeps in files."""
    zero = given.get("zero_optimization") or {}
    parts = {part: zero.get(part) or {} for part in OFFLOADED}
    return {part: own for part, own in parts.items() if own.get("device") == "nvme"}


def uses_disk(text: str) -> bool:
    return bool(parts_on_disk(settings_of(text)))


def with_settings(raw: Mapping[str, Any], faults: list[Fault]) -> JsonObject:
    """Return a `train:` mapping whose `engine: {deepspeed: SETTINGS}` is merged with its other keys.

    A setting that contradicts a key of the job is a fault; one whose key is left out becomes this key.
    """
    merged = {key: value for key, value in raw.items() if key != "engine"}
    merged["engine"] = "deepspeed"
    engine = raw["engine"]
    given = engine.get("deepspeed")
    if set(engine) != {"deepspeed"} or not isinstance(given, Mapping):
        problem = "is no {deepspeed: SETTINGS}, a file's name or its content"
        faults.append(
            Fault("train.engine", problem, "engine: deepspeed, or engine: {deepspeed: ds_config.json}")
        )
        return merged
    faults += _unsupported(given)
    rows = (*SHARED, *(SCALES if _get(given, "fp16.enabled") is True else ()))
    for row in rows:
        value = _get(given, row.path)
        if value in (None, AUTO):
            continue
        try:
            _adopt(merged, row.path, row.key, row.convert(value), faults)
        except (TypeError, ArithmeticError):
            faults.append(Fault(f"{KEY}.{row.path}", f"is {value!r}; a number is needed"))
    _precision(given, merged, faults)
    _offload(given, merged, faults)
    passed = {key: value for key, value in given.items() if key in PASSED and value != AUTO}
    merged["deepspeed"] = json.dumps(passed) if passed else ""
    return merged


def placed_in_settings(raw: Mapping[str, object], faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults with the keys of DeepSpeed's settings instead of the keys of the job to which they were
    converted.
    """
    engine = raw.get("engine")
    given = engine.get("deepspeed") if isinstance(engine, Mapping) else None
    if not isinstance(given, Mapping):
        return list(faults)
    places = {
        f"train.{row.key}": f"{KEY}.{row.path}"
        for row in (*SHARED, *SCALES)
        if _get(given, row.path) not in (None, AUTO) and _get(raw, row.key) is None
    }
    return [replace(fault, key=places.get(fault.key, fault.key)) for fault in faults]


def _get(settings: Mapping[str, Any], path: str) -> Any:
    value: Any = settings
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _adopt(merged: JsonObject, path: str, key: str, value: object, faults: list[Fault]) -> None:
    """Set a key of the job that is left out; add a fault if it is set to another value."""
    section, _, name = key.rpartition(".")
    place = merged
    if section:
        inner = merged.get(section) or {}
        if not isinstance(inner, Mapping):
            faults.append(
                Fault(f"{KEY}.{path}", f"is {value!r}, and the job says {section}: {inner!r}", "keep one")
            )
            return
        place = merged[section] = dict(inner)
    own = place.get(name)
    if own is None:
        place[name] = value
    elif own != value:
        problem = f"is {value!r}, and the job's {key} is {own!r}"
        faults.append(Fault(f"{KEY}.{path}", problem, "make them equal, or leave one of them out"))


def _precision(given: Mapping[str, Any], merged: JsonObject, faults: list[Fault]) -> None:
    bf16 = "bfloat16" if "bfloat16" in given else "bf16"
    enabled = [
        name for name, key in (("fp16", "fp16"), ("bf16", bf16)) if _get(given, f"{key}.enabled") is True
    ]
    if len(enabled) == 2:
        faults.append(Fault(f"{KEY}.{bf16}.enabled", "is true, and so is fp16.enabled", "enable one of them"))
    elif enabled:
        key = bf16 if enabled[0] == "bf16" else "fp16"
        _adopt(merged, f"{key}.enabled", "precision", enabled[0], faults)
    for name, key in (("fp16", "fp16"), ("bf16", bf16)):
        if _get(given, f"{key}.enabled") is False and merged.get("precision") == name:
            problem = f"is false, and the job's precision is {name}"
            faults.append(Fault(f"{KEY}.{key}.enabled", problem, "make them equal, or leave one of them out"))
    fixed = _get(given, "fp16.loss_scale")
    if enabled == ["fp16"] and isinstance(fixed, (int, float)) and fixed > 0:
        scale = merged.get("loss_scale")
        if scale not in (None, fixed) and not (
            isinstance(scale, Mapping) and set(scale) <= {"initial", "least"}
        ):
            _adopt(merged, "fp16.loss_scale", "loss_scale", fixed, faults)
        merged["loss_scale"] = fixed


def _offload(given: Mapping[str, Any], merged: JsonObject, faults: list[Fault]) -> None:
    for part in OFFLOADED:
        path = f"zero_optimization.{part}"
        device = _get(given, f"{path}.device")
        if device in (None, "none"):
            continue
        if device not in ("cpu", "nvme"):
            faults.append(Fault(f"{KEY}.{path}.device", f"is {device!r}", "device: cpu, or nvme"))
        if device == "nvme":
            faults += _nvme_faults(given, path, merged)
        if (part == "offload_param" or device == "nvme") and merged.get("zero") != 3:
            problem = f"goes with ZeRO 3, and the stage is {merged.get('zero', 0)}"
            faults.append(Fault(f"{KEY}.zero_optimization.stage", problem, "zero_optimization: {stage: 3}"))
        if part == "offload_optimizer":
            _adopt(merged, f"{path}.device", "offload", True, faults)


def _nvme_faults(given: Mapping[str, Any], path: str, merged: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the reasons why a part cannot be moved to a disk."""
    folder = _get(given, f"{path}.nvme_path")
    if not isinstance(folder, str) or not folder.startswith("/"):
        problem = f"is {folder!r}, and device: nvme needs a folder on each node's own disk"
        yield Fault(f"{KEY}.{path}.nvme_path", problem, "nvme_path: /local_nvme")
    tune = merged.get("tune")
    if path.endswith("param") and isinstance(tune, Mapping) and tune.get("lora"):
        problem = (
            "is nvme, and the weights that LoRA leaves as they are cannot be read there for a checkpoint"
        )
        yield Fault(f"{KEY}.{path}.device", problem, "device: cpu")


def _unsupported(given: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the settings that the trainer does not follow; disabled ones change nothing."""
    known = [*PASSED, *UNUSED, *REFUSED, "fp16", "bf16", "bfloat16", "optimizer"]
    for key, value in given.items():
        if isinstance(value, Mapping) and value.get("enabled") is False:
            continue
        if key in REFUSED:
            yield Fault(f"{KEY}.{key}", "is not supported here", f"leave it out: {REFUSED[key]}")
        elif key not in known:
            yield Fault(f"{KEY}.{key}", "is not a setting that is known here", closest_match(key, known))
    kind = _get(given, "optimizer.type")
    if kind not in (None, *OPTIMIZERS):
        yield Fault(f"{KEY}.optimizer.type", f"is {kind!r}", "AdamW is the only optimizer")
    for key in set(_get(given, "optimizer.params") or ()) - {"lr", "betas", "eps", "weight_decay"}:
        if key not in ("torch_adam", "adam_w_mode", "warmup_min_lr"):
            yield Fault(f"{KEY}.optimizer.params.{key}", "is not supported here", "leave it out")


def settings_faults(text: str, accumulation: int) -> Iterator[Fault]:
    """Yield the settings that contradict what follows from the layout."""
    given = settings_of(text).get("gradient_accumulation_steps")
    if given not in (None, AUTO, accumulation):
        problem = f"is {given!r}, and global_batch / micro_batch / data parallel ranks is {accumulation}"
        yield Fault(f"{KEY}.gradient_accumulation_steps", problem, "leave it out")
