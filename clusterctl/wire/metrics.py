"""The lines of metrics.jsonl: what the trainer writes, and one reader for the lines of any program."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterctl.wire.results import Evaluation
from clusterctl.wire.typed_json import BadValue, encode, parse


@dataclass(frozen=True)
class ChosenBackend:
    """The backend of one fused op, and why it was chosen."""

    op: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Started:
    """A training starts or resumes: its step, configuration and hardware."""

    step: int
    """Number of finished steps."""
    resumed_from: str | None
    """The checkpoint's folder."""
    steps: int
    run: str
    attempt: int
    world: int
    layout: Mapping[str, int]
    parameters: int
    engine: str
    zero: int
    precision: str
    native: tuple[ChosenBackend, ...]
    device: str
    threads: int
    torch: str
    config: Mapping[str, object]
    """The `train:` part of the job, as JSON."""
    notes: tuple[str, ...]
    startup: Mapping[str, float]
    """Seconds of each part of the start."""


@dataclass(frozen=True)
class StepDone:
    """A step is finished; `tokens` counts from the beginning of the training, the rate is that of this step.

    `own_seconds` is the part of `step_seconds` in which this rank did not wait for others.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    skipped: bool
    cause: str = ""
    """For the first of several non-finite steps: its first non-finite layer."""
    own_seconds: float = 0.0
    samples: int = 0
    """Samples of this step, over all ranks."""
    consumed: int = 0
    """Samples since the beginning of the training."""
    loss_scale: float | None = None
    """The factor that fp16 multiplied the loss by; None in other precisions."""
    calibrating: bool = False
    """True if the step was skipped because the loss scale was too high and is being lowered."""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation is finished; `loss` is the mean over all ranks."""

    step: int
    loss: float
    seconds: float
    accuracy: float | None = None
    """The fraction of correct answers, if the training learns a task."""


@dataclass(frozen=True)
class Ended:
    """The training ended; `stopped` if before its last step. `loss` and `eval_loss` are the last values."""

    step: int
    stopped: bool
    loss: float | None
    eval_loss: float | None
    seconds: float


@dataclass(frozen=True)
class MemoryTaken:
    """The peak memory of each rank since its start in bytes, and the plan's figure for each."""

    step: int
    bytes: tuple[int, ...]
    planned: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """The training failed at this step; `message` says why."""

    step: int
    message: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on disk: its step, folder, size over all its files, and how long it took."""

    step: int
    path: Path
    bytes: int
    seconds: float
    stall: float = 0.0
    """Seconds during which training waited for the save."""
    background: bool = False
    """Whether it was written while training continued."""


@dataclass(frozen=True)
class SaveSkipped:
    """A checkpoint that was not begun, because the one before was still being written."""

    step: int
    writing: int
    """The step whose checkpoint was being written."""


Written = Started | StepDone | Evaluated | Evaluation | Saved | SaveSkipped | MemoryTaken | Failed | Ended
"""What a line of the trainer tells."""
KINDS: dict[type[Written], str] = {
    Started: "start",
    StepDone: "step",
    Evaluated: "eval",
    Evaluation: "evaluation",
    Saved: "checkpoint",
    SaveSkipped: "checkpoint_skipped",
    MemoryTaken: "memory",
    Failed: "failed",
    Ended: "end",
}


def metric_line(event: Written, more: Mapping[str, object]) -> dict[str, object]:
    """Return the line of an event, with further keys."""
    kind = "stopped" if isinstance(event, Ended) and event.stopped else KINDS[type(event)]
    values = {**encode(event), **more}
    return {"event": kind, **{key: _plain(value) for key, value in values.items()}, "time": time.time()}


def _plain(value: object) -> object:
    """Return the value for JSON: NaN and infinity become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Keys of a line of metrics that must be numbers, and those that a line of each kind must have.
NUMBERS = ("step", "steps", "loss", "grad_norm", "tokens_per_second", "step_seconds", "parameters", "time")
NEEDED = {"step": ("step",), "eval": ("step", "loss"), "checkpoint": ("step",)}


@dataclass(frozen=True)
class Metric:
    """One line of metrics. Any program may have written it, so every value may be missing."""

    kind: str = ""
    """`start`, `step`, `eval`, `checkpoint` and the like; "" if the line does not say."""
    step: int | None = None
    steps: int | None = None
    """Total number of steps of the training."""
    loss: float | None = None
    diverged: bool = False
    """The line has a loss that is not finite, for which JSON has no number."""
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    parameters: int | None = None
    time: float | None = None
    """Seconds since the epoch."""
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """All keys of the line, including those above and those that only some kinds have; wrong numbers are left out."""

    def as_json(self) -> dict[str, Any]:
        """Return the line as it is written."""
        return dict(self.facts)


def read_metric(value: object) -> Metric | None:
    """Return a line of metrics without wrong values, or None if nothing useful remains."""
    if not isinstance(value, dict):
        return None
    facts = {key: item for key, item in value.items() if key not in NUMBERS or is_number(item)}
    if "loss" in value and "loss" not in facts:
        facts["diverged"] = True
    event = value.get("event")
    kind = event if isinstance(event, str) else ""
    if not all(key in facts for key in NEEDED.get(kind, ())):
        return None
    return Metric(
        kind,
        _whole(facts.get("step")),
        _whole(facts.get("steps")),
        facts.get("loss"),
        bool(facts.get("diverged")),
        facts.get("grad_norm"),
        facts.get("tokens_per_second"),
        facts.get("step_seconds"),
        _whole(facts.get("parameters")),
        facts.get("time"),
        facts,
    )


def metric_objects(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the complete lines of a file as they are; the last one may be unfinished."""
    for text in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = parse(text)
        except BadValue:
            # A node died within this line.
            continue
        if isinstance(line, dict):
            yield line


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def is_number(value: object) -> bool:
    """Return True for a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value.bit_length() < 1000 if isinstance(value, int) else math.isfinite(value)
