"""What a check of a rank table reports: the finding, its severity, and the hardware that the table is for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from clusterctl.errors import UsageError, did_you_mean
from clusterctl.text import escape_controls


class Severity(str, Enum):
    """Who objects to a table."""

    REFUSED = "refused"
    """HCCL (or torch_npu) does not use the table."""
    WRONG = "wrong"
    """HCCL reads the table, but the job fails later or the table does not mean what it seems to."""


@dataclass(frozen=True)
class Finding:
    """One broken rule; `pointer` is a JSON pointer, empty for the whole file."""

    code: str
    pointer: str
    what: str
    remedy: str
    hccl_message: str = ""
    """The message of HCCL or torch_npu; empty when it reports none."""
    severity: Severity = Severity.REFUSED

    @property
    def hccl_code(self) -> str:
        """Return HCCL's error code, such as `EI0014`, or ""."""
        match = re.match(r"EI\d{4}", self.hccl_message)
        return match[0] if match else ""


@dataclass(frozen=True)
class Hardware:
    """What one generation of devices demands of its table."""

    name: str
    versions: tuple[str, ...]
    devices: int
    """Device ids are below this."""
    equal_counts: bool = False
    """Every server must have the same number of devices."""


HARDWARE = {
    "910a": Hardware("910a", ("", "1.0"), 8, equal_counts=True),
    "a2": Hardware("a2", ("", "1.0"), 16),
    "a3": Hardware("a3", ("1.2",), 16),
    "a5": Hardware("a5", ("2.0",), 65),
}
# The hardware of each version, when the user names none.
GUESS = {"": "910a", "1.0": "a2", "1.2": "a3", "2.0": "a5"}


def hardware_named(name: str) -> Hardware:
    """Return the hardware of this name; raise UsageError with the closest match for an unknown one."""
    if name not in HARDWARE:
        near = did_you_mean(name, list(HARDWARE))
        raise UsageError(f"unknown hardware {name!r}", near or f"one of {', '.join(HARDWARE)}")
    return HARDWARE[name]


def version_for(hardware: str | None) -> str:
    """Return the version of a new table for this hardware; 1.0 when no hardware is named."""
    return hardware_named(hardware).versions[-1] if hardware else "1.0"


def missing(key: str) -> str:
    """Return HCCL's message about a missing key."""
    return f"EI0017: Config {key} is missing in the ranktable file."


def invalid(value: object, name: str, expected: str) -> str:
    """Return HCCL's message about an invalid value."""
    shown = escape_controls(str(value)[:80])
    return f"EI0014: Value {shown} for ranktable variable {name} is invalid. Expected value: {expected}."


def kind(value: object) -> str:
    """Return the type of a JSON value in words, such as "a string"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "an object" if isinstance(value, dict) else "not a JSON value")
