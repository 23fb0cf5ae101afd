"""Compare the chip that a job names with the chip that its nodes report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.chips import reported_chip
from trainer.errors import Fault


def with_reported(train: object, name: object) -> tuple[object, list[Fault]]:
    """Return the train part with the chip that the nodes report as `name` (`Ascend910B3`), unless the job names a chip.

    If the job's chip contradicts the nodes, it is a fault. An unknown name changes nothing.
    """
    chip = reported_chip(name) if isinstance(name, str) else None
    hardware: Any = (train.get("hardware") or {}) if isinstance(train, Mapping) else None
    if chip is None or not isinstance(train, Mapping) or not isinstance(hardware, Mapping):
        return train, []
    given = hardware.get("chip")
    if not given:
        return {**train, "hardware": {**hardware, "chip": chip.name}}, []
    if given == chip.name:
        return train, []
    problem = f"is {given}, but the nodes report {name}, which is {chip.title}"
    return train, [Fault("train.hardware.chip", problem, f"hardware.chip: {chip.name}, or remove this key")]
