"""The state of a script: variables, arguments, functions, written files; and what two states have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from clusterctl.bash.texts import Value, divided, shown, unknown

# The name under which the standard input of a command is kept.
GIVEN = "\x00given"


class Stop(Exception):
    """A script, a function or a loop ends here."""

    def __init__(self, kind: str, status: int, where: str) -> None:
        self.kind, self.status, self.where = kind, status, where


@dataclass
class State:
    """What a script has set so far."""

    variables: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    functions: dict[str, object] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """The texts of files that the script writes, such as here-documents."""
    folder: str = "."
    """The working folder, seen from where the script starts."""

    def copy(self) -> State:
        return replace(
            self,
            variables={
                name: dict(value) if isinstance(value, dict) else value
                for name, value in self.variables.items()
            },
            arguments=list(self.arguments),
            functions=dict(self.functions),
            files=dict(self.files),
        )

    def set_again(self, values: Mapping[str, Value | None]) -> None:
        """Give variables their earlier values; None for those that were not set."""
        for name, value in values.items():
            self.variables.pop(name, None)
            if value is not None:
                self.variables[name] = value

    def merge(self, other: State) -> dict[str, str]:
        """Keep what is equal in both states; return for each other variable what it may be."""
        lost = {}
        for name in {**self.variables, **other.variables}:
            first, second = self.variables.get(name), other.variables.get(name)
            if first != second:
                self.variables[name] = _common(first, second, name)
                lost[name] = f"{name} is {_short(first)} or {_short(second)}"
        if self.arguments != other.arguments:
            self.arguments = _equal_part(self.arguments, other.arguments)
        self.functions = {**other.functions, **self.functions}
        for path in {**self.files, **other.files}:
            if self.files.get(path) != other.files.get(path):
                self.files[path] = unknown(path)
        return lost


def _equal_part(first: list[str], second: list[str]) -> list[str]:
    return [word for word, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def _common(first: Value | None, second: Value | None, name: str) -> Value:
    """Return what both values begin with, and an unknown part."""
    if isinstance(first, dict) and isinstance(second, dict):
        equal = {key: value for key, value in first.items() if second.get(key) == value}
        return {**equal, "unknown": unknown(f"${{{name}[@]}}")}
    if isinstance(first, str) and isinstance(second, str) and len(divided(first + second)) > 2:
        equal_words = _equal_part(divided(first), divided(second))
        return " ".join([*equal_words, unknown(f"${name}")])
    return unknown(f"${name}")


def _short(value: Value | None) -> str:
    text = " ".join(value.values()) if isinstance(value, dict) else value
    return (
        "unset"
        if text is None
        else repr(text if len(text := shown(text)) <= 40 else f"{text[:18]}...{text[-18:]}")
    )
