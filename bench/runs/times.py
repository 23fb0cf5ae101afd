"""Compute the figures of bench/runs/recover.py and bench/runs/goodput.py from a training's metrics: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def steps_of(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record for record in metrics if record["event"] == "step"]


def first_step(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Return when the first step was done."""
    return next((float(record["time"]) for record in steps_of(metrics)), None)


@dataclass(frozen=True)
class Return:
    """The recovery of a training after a kill: times by the wall clock, parts in seconds."""

    new_step: float
    """When the first step was done that was not done before the kill."""
    began: float
    """When the new process of rank 0 started."""
    parts: dict[str, float]
    """The parts of rank 0's start, as the trainer reports them."""
    starts: int
    """How often the ranks started to train after the kill: more than once if a restart failed."""


def recovered(metrics: Sequence[Mapping[str, Any]], killed: float) -> Return | None:
    """Return how a training recovered from a kill; None if it has not yet. Repeated steps are not new
    steps."""
    places = [i for i, record in enumerate(metrics) if record["event"] == "start" and record["time"] > killed]
    if not places:
        return None
    reached = max((record["step"] for record in steps_of(metrics[: places[0]])), default=0)
    starts, last = 0, metrics[places[0]]
    for record in metrics[places[0] :]:
        if record["event"] == "start":
            starts, last = starts + 1, record
        elif record["event"] == "step" and record["step"] > reached:
            parts = {name: float(seconds) for name, seconds in last["startup"].items()}
            return Return(float(record["time"]), float(last["time"]) - sum(parts.values()), parts, starts)
    return None


def durations(began: float, moments: Mapping[str, float]) -> dict[str, float]:
    """Return for each moment, in order, the seconds since the moment before it."""
    found, last = {}, began
    for name, moment in moments.items():
        found[name], last = moment - last, max(last, moment)
    return found


def middle(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each part over several turns, in the order of the first turn."""
    names = [name for name in several[0] if all(name in turn for turn in several)] if several else []
    return {name: statistics.median(turn[name] for turn in several) for name in names}


@dataclass(frozen=True)
class Goodput:
    """How a training spent its time."""

    wall: float
    counted: float
    """Seconds in steps that counted: each step once, the last time it was done."""
    again: float
    """Seconds in steps that had to be repeated."""
    saving: float
    """Seconds in checkpoints."""
    steps: int

    @property
    def share(self) -> float:
        return self.counted / self.wall if self.wall > 0 else 0.0

    @property
    def idle(self) -> float:
        """Return the seconds in neither steps nor checkpoints: starts, restarts, waits."""
        return max(0.0, self.wall - self.counted - self.again - self.saving)


def goodput(metrics: Sequence[Mapping[str, Any]], began: float, ended: float) -> Goodput:
    """Return how the time from `began` to `ended` was spent."""
    inside = [record for record in metrics if began <= record["time"] <= ended]
    last: dict[int, float] = {}
    whole = 0.0
    for record in steps_of(inside):
        last[record["step"]] = float(record["step_seconds"])
        whole += float(record["step_seconds"])
    counted = sum(last.values())
    saving = sum(float(record["seconds"]) for record in inside if record["event"] == "checkpoint")
    return Goodput(ended - began, counted, whole - counted, saving, len(last))
