"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One result: level (ok, note, warning or bad), where, what, and the remedy."""

    level: str
    where: str
    what: str
    remedy: str = ""
    check: str = ""
    """Name of the check, for programs: disk, clock, master-port, ..."""
    fix: str = ""
    """A command that fixes the problem or shows more, to be run at `where`."""

    @property
    def is_sound(self) -> bool:
        return self.level in ("ok", "note")
