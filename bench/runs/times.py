"""What bench/runs/recover.py and bench/runs/goodput.py read out of a training's own metrics: values in, values out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Metrics = Sequence[Mapping[str, Any]]


def steps_of(metrics: Metrics) -> list[Mapping[str, Any]]:
    return [one for one in metrics if one["event"] == "step"]


def first_step(metrics: Metrics) -> float | None:
    """When the first step was done."""
    return next((float(one["time"]) for one in steps_of(metrics)), None)


@dataclass(frozen=True)
class Return:
    """A training that got on again after a death: times by the wall clock, parts in seconds."""

    new_step: float
    """When a step was done that none before the death had been."""
    began: float
    """When rank 0's new process began."""
    parts: dict[str, float]
    """Of its start, as the trainer tells them."""
    starts: int
    """How often the ranks began to train after the death; more than one where a restart failed."""


def recovered(metrics: Metrics, killed: float) -> Return | None:
    """How a training came back from a death; None while it has not. Steps that are done again are no new ones."""
    places = [i for i, one in enumerate(metrics) if one["event"] == "start" and one["time"] > killed]
    if not places:
        return None
    reached = max((one["step"] for one in steps_of(metrics[: places[0]])), default=0)
    starts, last = 0, metrics[places[0]]
    for one in metrics[places[0] :]:
        if one["event"] == "start":
            starts, last = starts + 1, one
        elif one["event"] == "step" and one["step"] > reached:
            parts = {name: float(seconds) for name, seconds in last["startup"].items()}
            return Return(float(one["time"]), float(last["time"]) - sum(parts.values()), parts, starts)
    return None


def durations(began: float, moments: Mapping[str, float]) -> dict[str, float]:
    """Moments in their order, as the seconds from each to the one before it."""
    found, last = {}, began
    for name, moment in moments.items():
        found[name], last = moment - last, max(last, moment)
    return found


def middle(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each part over several turns, in the order of the first."""
    names = [name for name in several[0] if all(name in one for one in several)] if several else []
    return {name: statistics.median(one[name] for one in several) for name in names}


@dataclass(frozen=True)
class Goodput:
    """What became of a training's time."""

    wall: float
    counted: float
    """Seconds in steps that stayed: each step once, as it was done last."""
    again: float
    """Seconds in steps that had to be done again."""
    saving: float
    """Seconds in checkpoints."""
    steps: int

    @property
    def share(self) -> float:
        return self.counted / self.wall if self.wall > 0 else 0.0

    @property
    def idle(self) -> float:
        """Seconds in no step and no checkpoint: starts, restarts, waits."""
        return max(0.0, self.wall - self.counted - self.again - self.saving)


def goodput(metrics: Metrics, began: float, ended: float) -> Goodput:
    """The share of the time from `began` to `ended` that went into steps that counted."""
    inside = [one for one in metrics if began <= one["time"] <= ended]
    last: dict[int, float] = {}
    whole = 0.0
    for one in steps_of(inside):
        last[one["step"]] = float(one["step_seconds"])
        whole += float(one["step_seconds"])
    counted = sum(last.values())
    saving = sum(float(one["seconds"]) for one in inside if one["event"] == "checkpoint")
    return Goodput(ended - began, counted, whole - counted, saving, len(last))
