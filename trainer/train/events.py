"""What the loop tells: values, for whoever observes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.checkpoint.saved import Saved, SaveSkipped


@dataclass(frozen=True)
class StepBegan:
    step: int


@dataclass(frozen=True)
class StepDone:
    """`tokens` counts from the beginning of the training; the rate is of this step.

    `own_seconds` is this rank's part of `step_seconds`: without what it waited for others.
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
    """Where the first of several steps that were not finite went wrong."""
    own_seconds: float = 0.0
    samples: int = 0
    """Of this step, over all ranks."""
    consumed: int = 0
    """Samples since the beginning of the training."""
    loss_scale: float | None = None
    """What fp16 multiplied the loss by."""
    calibrating: bool = False
    """Skipped because that was too much: it is halved until it fits."""


@dataclass(frozen=True)
class Evaluated:
    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Ended:
    """`stopped`: asked to end before the last step; `loss` and `eval_loss` are the last ones known."""

    step: int
    stopped: bool
    loss: float | None
    eval_loss: float | None
    seconds: float


@dataclass(frozen=True)
class MemoryTaken:
    """Bytes that each rank held at most since its start, and what the plan says of each."""

    step: int
    bytes: tuple[int, ...]
    planned: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """The training ends at this step, and why."""

    step: int
    message: str


Event = StepBegan | StepDone | Evaluated | Saved | SaveSkipped | MemoryTaken | Failed | Ended
Observer = Callable[[Event], None]
