"""What a training run's metrics add up to: where it is, how fast, how long it still takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


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
        self.losses.append((metric["step"], metric["loss"]))
        seconds = metric.get("step_seconds")
        if seconds:
            self.step_seconds = (
                seconds if self.step_seconds is None else 0.9 * self.step_seconds + 0.1 * seconds
            )

    @property
    def left(self) -> float | None:
        """Seconds until the last step, at the speed of the last ones."""
        if self.last is None or self.step_seconds is None:
            return None
        return float((self.last["steps"] - self.last["step"]) * self.step_seconds)


def read_progress(metrics: Iterable[Mapping[str, Any]]) -> TrainProgress:
    """The progress that metrics kept in a file tell of."""
    progress = TrainProgress()
    for metric in metrics:
        progress.feed(metric)
    return progress
