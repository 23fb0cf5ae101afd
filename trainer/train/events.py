"""The events that the loop emits to its observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.checkpoint.saved import Saved, SaveSkipped


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
class StepBegan:
    """A step begins; steps count from 1."""

    step: int


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
class Figure:
    """One result of a task and its standard error."""

    value: float
    standard_error: float | None


@dataclass(frozen=True)
class TaskEvaluated:
    """A task was evaluated after a step."""

    step: int
    task: str
    convention: str
    data: str
    data_sha256: str
    documents: int
    metrics: Mapping[str, Figure]
    seconds: float


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


Event = (
    Started
    | StepBegan
    | StepDone
    | Evaluated
    | TaskEvaluated
    | Saved
    | SaveSkipped
    | MemoryTaken
    | Failed
    | Ended
)
Observer = Callable[[Event], None]
