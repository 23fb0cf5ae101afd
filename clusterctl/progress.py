"""What a training run's metrics add up to: where it is, how fast, how long it still takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NUMBERS = ("step", "steps", "loss", "grad_norm", "tokens_per_second", "step_seconds", "parameters", "time")
NEEDED = {"step": ("step",), "eval": ("step", "loss"), "checkpoint": ("step",)}


def metric_of(said: Any) -> dict[str, Any] | None:
    """A line of metrics as it can be counted on, whatever program wrote it: what should be a number and is none is
    left out; a loss that is not finite, which JSON has no number for, is `diverged`. None for a line that says
    nothing."""
    if not isinstance(said, dict):
        return None
    found = {key: value for key, value in said.items() if key not in NUMBERS or _is_number(value)}
    if "loss" in said and "loss" not in found:
        found["diverged"] = True
    kind = said.get("event")
    return found if all(key in found for key in (NEEDED.get(kind, ()) if isinstance(kind, str) else ())) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass
class TrainProgress:
    """Fed with the trainer's metrics one by one; holds what a person wants to see of them."""

    start: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(step, training loss)."""
    evals: list[tuple[float, float]] = field(default_factory=list)
    """(step, validation loss)."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    step_seconds: float | None = None
    """A step's duration, smoothed over about ten steps."""

    def feed(self, metric: Mapping[str, Any]) -> None:
        kind = metric.get("event")
        if kind == "start":
            self.start = dict(metric)
        elif kind == "step":
            self._step(metric)
        elif kind == "eval":
            self.evals = [one for one in self.evals if one[0] < metric["step"]] + [
                (metric["step"], metric["loss"])
            ]
        elif kind == "checkpoint":
            self.checkpoints.append(dict(metric))

    def _step(self, metric: Mapping[str, Any]) -> None:
        self.last = dict(metric)
        while self.losses and self.losses[-1][0] >= metric["step"]:  # an attempt that resumed repeats steps
            self.losses.pop()
        if "loss" in metric:
            self.losses.append((metric["step"], metric["loss"]))
        seconds = metric.get("step_seconds")
        if seconds:
            self.step_seconds = (
                seconds if self.step_seconds is None else 0.9 * self.step_seconds + 0.1 * seconds
            )

    @property
    def left(self) -> float | None:
        """Seconds until the last step, at the speed of the last ones."""
        if self.last is None or self.step_seconds is None or "steps" not in self.last:
            return None
        return float((self.last["steps"] - self.last["step"]) * self.step_seconds)


def read_progress(metrics: Iterable[Mapping[str, Any]]) -> TrainProgress:
    """The progress that metrics kept in a file tell of."""
    progress = TrainProgress()
    for metric in metrics:
        progress.feed(metric)
    return progress
