"""Values for the lines of a run's events, with one reader and one writer; those of its metrics are in `wire`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterctl.json_types import JsonObject
from clusterctl.wire.metrics import Metric as Metric
from clusterctl.wire.metrics import is_number
from clusterctl.wire.metrics import read_metric as read_metric


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
    return Event(time, kind, facts) if isinstance(kind, str) and is_number(time) else None


@dataclass(frozen=True)
class Events:
    """The history of a run, oldest first."""

    events: tuple[Event, ...]
    damaged: int = 0
    """Lines that could not be read."""
