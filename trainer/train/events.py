"""The events that the loop emits to its observers; those that metrics.jsonl has are declared in `wire`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clusterctl.wire.metrics import Written


@dataclass(frozen=True)
class StepBegan:
    """A step begins; steps count from 1."""

    step: int


Event = StepBegan | Written
Observer = Callable[[Event], None]
