"""Values for the lines of a run's metrics and events, with one reader and one writer for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterctl.json_types import JsonObject

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

    def as_json(self) -> JsonObject:
        """Return the line as it is written."""
        return dict(self.facts)


def read_metric(value: object) -> Metric | None:
    """Return a line of metrics without wrong values, or None if nothing useful remains."""
    if not isinstance(value, dict):
        return None
    facts = {key: item for key, item in value.items() if key not in NUMBERS or _is_number(item)}
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


@dataclass(frozen=True)
class Event:
    """One line of a run's history: what happened, and when."""

    time: float
    """Seconds since the epoch."""
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The keys that only some kinds have."""

    def as_json(self) -> JsonObject:
        """Return the line as it is written."""
        return {"time": self.time, "event": self.kind, **self.facts}


def read_event(value: object) -> Event | None:
    """Return a line of the history, or None if it does not say what happened and when."""
    if not isinstance(value, dict):
        return None
    facts = dict(value)
    time, kind = facts.pop("time", None), facts.pop("event", None)
    return Event(time, kind, facts) if isinstance(kind, str) and _is_number(time) else None


@dataclass(frozen=True)
class Events:
    """The history of a run, oldest first."""

    events: tuple[Event, ...]
    damaged: int = 0
    """Lines that could not be read."""


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _is_number(value: object) -> bool:
    """Return True for a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value.bit_length() < 1000 if isinstance(value, int) else math.isfinite(value)
