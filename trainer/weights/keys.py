"""Read another program's config key by key; all faults are reported together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import CheckpointError

MOST_LAYERS = 10_000


class Keys:
    """A config.json whose keys are read one by one; it collects the values that cannot be mapped."""

    def __init__(self, source: str, document: Mapping[str, object], faults: list[str] | None = None) -> None:
        """`faults`: a list that is shared with other keys of the same file."""
        self._source, self.document = source, document
        self.faults: list[str] = [] if faults is None else faults

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that exists."""
        for name in names:
            if self.document.get(name) is not None:
                return self.document[name]
        return default

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = 1 << 24) -> int:
        """Return a whole number; add a fault if it is out of range."""
        value = self.get(*names, default=default)
        if type(value) is not int or not least <= value <= most:
            self.faults.append(f"{names[0]} is {value!r}: a whole number from {least} to {most:,} is needed")
            return 1
        return value

    def layers(self, *names: str, default: int | None = None) -> int:
        """Return a number of layers."""
        return self.number(*names, default=default, most=MOST_LAYERS)

    def real(self, *names: str, default: float) -> float:
        """Return a number of at least 0."""
        value = self.get(*names, default=default)
        if type(value) not in (int, float) or not 0 <= value < 1e12:
            self.faults.append(f"{names[0]} is {value!r}: a number is needed")
            return default
        return float(value)

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return our name for a key's value; add a fault if there is none."""
        value = self.get(name, default=default)
        if not isinstance(value, str) or value not in choices:
            self.faults.append(f"{name} is {value!r}: only {', '.join(choices)} can be mapped")
            return next(iter(choices.values()))
        return choices[value]

    def must_be(self, name: str, wanted: object, default: object, reason: str) -> None:
        """Add a fault if a key has another value than the one that can be mapped."""
        value = self.get(name, default=default)
        if value != wanted:
            self.faults.append(f"{name} is {value!r}: {reason}")

    def check(self) -> None:
        """Raise a CheckpointError that lists all faults."""
        if self.faults:
            problem = "\n".join(f"{self._source}: {fault}" for fault in self.faults)
            raise CheckpointError(problem, "this variant of the model cannot be mapped to ours")
