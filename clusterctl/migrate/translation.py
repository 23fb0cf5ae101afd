"""The result of a translation: a job's keys with the options that they come from, and the options not mapped."""

from __future__ import annotations

from dataclasses import dataclass, field

from clusterctl.errors import Fault, InputFaults
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


# Values by name, each with the option that gave it.
Facts = dict[str, tuple[object, str]]


def of(facts: Facts, name: str) -> object:
    return facts[name][0] if name in facts else None


def number(facts: Facts, name: str) -> float:
    value = of(facts, name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def current(result: Translation, key: str, default: float = 1) -> float:
    value = result.values[key].value if key in result.values else default
    return float(value) if isinstance(value, (int, float)) else default


def wrong(result: Translation, name: str, problem: str, remedy: str) -> Exception:
    where = next((given.where for given in result.found.given if given.name == name), result.found.source)
    return InputFaults([Fault(f"{where} {name}", problem, remedy)])


def leave_out(result: Translation, facts: Facts, name: str, reason: str) -> None:
    """Move an option from the mapped ones to those that are not mapped."""
    option = facts[name][1]
    if option in result.mapped:
        result.mapped.remove(option)
    result.unmapped.append((option, reason))
