"""The facts that options give, and how they are read: values that become keys of a job only together."""

from __future__ import annotations

from clusterctl.errors import Fault, InputFaults
from clusterctl.migrate.translation import Translation

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
