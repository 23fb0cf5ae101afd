"""What a check answers with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One answer: `level` is ok, note, warning or bad; where, what, and what to do about it."""

    level: str
    where: str
    what: str
    remedy: str = ""
    check: str = ""
    """The check's name, for programs: disk, clock, master-port, ..."""
    fix: str = ""
    """A command line that mends it or shows more, to be typed at `where`."""

    @property
    def is_sound(self) -> bool:
        return self.level in ("ok", "note")
