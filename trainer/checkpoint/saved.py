"""The event that a checkpoint was saved."""

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
