"""The result of a translation: a job's keys with the options that they come from, and the options not mapped."""

from __future__ import annotations

from dataclasses import dataclass, field

from clusterctl.migrate.found import Found


@dataclass(frozen=True)
class Value:
    """A key's value and the option that it comes from."""

    value: object
    origin: str


@dataclass
class Translation:
    """The values of a job, and the options that were mapped or not."""

    found: Found
    values: dict[str, Value] = field(default_factory=dict)
    """The values by the job's keys, as in `train.model.layers`."""
    mapped: list[str] = field(default_factory=list)
    unmapped: list[tuple[str, str]] = field(default_factory=list)
    """The options that are not mapped, with the reason."""
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: object, origin: str) -> None:
        self.values[key] = Value(value, origin)
