"""What a check of a rank table finds, for which hardware, and the message that HCCL would have shown instead."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterctl.errors import UsageError, did_you_mean
from clusterctl.text import escape_controls


@dataclass(frozen=True)
class Finding:
    """One rule broken: `pointer` is a JSON pointer, empty for the whole file."""

    code: str
    pointer: str
    what: str
    remedy: str
    hccl_message: str = ""
    """What HCCL or torch_npu would have shown; empty where that is not known."""

    @property
    def hccl_code(self) -> str:
        """`EI0014` and the like."""
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
    """Every server must hold as many devices as the others."""


HARDWARE = {
    "910a": Hardware("910a", ("", "1.0"), 8, equal_counts=True),
    "a2": Hardware("a2", ("", "1.0"), 16),
    "a3": Hardware("a3", ("1.2",), 16),
    "a5": Hardware("a5", ("2.0",), 64),
}
# Hardware by version, when nobody says.
GUESS = {"": "910a", "1.0": "a2", "1.2": "a3", "2.0": "a5"}


def hardware_named(name: str) -> Hardware:
    """One of the four, or the error that names the near miss."""
    if name not in HARDWARE:
        near = did_you_mean(name, list(HARDWARE))
        raise UsageError(f"unknown hardware {name!r}", near or f"one of {', '.join(HARDWARE)}")
    return HARDWARE[name]


def version_for(hardware: str | None) -> str:
    """The version that a new table has: 1.0 where nobody says for which hardware."""
    return hardware_named(hardware).versions[-1] if hardware else "1.0"


def missing(key: str) -> str:
    return f"EI0017: Config {key} is missing in the ranktable file."


def invalid(value: object, name: str, expected: str) -> str:
    shown = escape_controls(str(value)[:80])
    return f"EI0014: Value {shown} for ranktable variable {name} is invalid. Expected value: {expected}."


def kind(value: object) -> str:
    """A JSON value's type in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    words = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return words.get(type(value), "an object" if isinstance(value, dict) else "no JSON value")
