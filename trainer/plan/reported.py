"""Compare the chip that a job names with the chip that its nodes report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.chips import reported_chip
from trainer.errors import Fault

# Drivers keep up to this part of a device's memory for themselves; less is a part of a chip, or another one.
WHOLE = 0.9


def with_reported(train: object, name: object, memory: int = 0) -> tuple[object, list[Fault]]:
    """Return the train part with the chip that the nodes report as `name` (`Ascend910B3`), unless the job names a chip.

    `memory`: the MiB of a device; the plan takes them if the chip is unknown or has more, unless the job names its own.
    If the job's chip contradicts the nodes, it is a fault.
    """
    hardware: Any = (train.get("hardware") or {}) if isinstance(train, Mapping) else None
    if not isinstance(train, Mapping) or not isinstance(hardware, Mapping):
        return train, []
    chip = reported_chip(name) if isinstance(name, str) else None
    gigabytes = memory * 2**20 / 1e9
    if memory and not hardware.get("memory") and (chip is None or gigabytes < WHOLE * chip.memory):
        hardware = {**hardware, "memory": round(gigabytes, 1)}
    given = hardware.get("chip")
    if chip is None or given == chip.name:
        return {**train, "hardware": hardware}, []
    if not given:
        return {**train, "hardware": {**hardware, "chip": chip.name}}, []
    problem = f"is {given}, but the nodes report {name}, which is {chip.title}"
    return train, [Fault("train.hardware.chip", problem, f"hardware.chip: {chip.name}, or remove this key")]
