"""Read the environment of this process. Only this module uses os.environ; it imports nothing else."""

from __future__ import annotations

import os


def inherited(names: tuple[str, ...]) -> dict[str, str]:
    """Return those of the named variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def environment() -> dict[str, str]:
    """Return a copy of the environment, for programs started on this machine."""
    return dict(os.environ)
