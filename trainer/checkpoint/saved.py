"""The reports of saves to the observers of a training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on disk: its step, folder, size over all its files, and how long it took."""

    step: int
    path: Path
    bytes: int
    seconds: float
    stall: float = 0.0
    """Seconds during which training waited for the save."""
    background: bool = False
    """Whether it was written while training continued."""


@dataclass(frozen=True)
class SaveSkipped:
    """A checkpoint that was not begun, because the one before was still being written."""

    step: int
    writing: int
    """The step whose checkpoint was being written."""
