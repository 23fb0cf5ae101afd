"""Refuse folders and files that other users of the machine can change or replace."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainer.errors import CheckpointError


def check_access(folder: Path) -> None:
    """Refuse a folder that every user may change: its hashes would prove nothing."""
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    if mode & 0o002:
        problem = f"{folder}: every user of this machine can change what is in it"
        raise CheckpointError(problem, f"chmod o-w {folder}, if you trust what is there")


def check_above(folder: Path) -> None:
    """Refuse a folder that every user may replace by another one."""
    above = folder.absolute().parent
    mode = above.stat().st_mode
    # In a folder such as /tmp users cannot replace what belongs to others.
    if mode & 0o002 and not mode & stat.S_ISVTX:
        problem = f"{above}: every user of this machine can replace what is in it"
        raise CheckpointError(problem, f"chmod o-w {above}, if you trust what is there")


def check_file(file: Path) -> int:
    """Return the size of a regular file; refuse links, which may lead out of the folder, and open permissions."""
    status = file.lstat()
    if not os.path.isfile(file) or os.path.islink(file):
        raise CheckpointError(f"{file}: not a regular file")
    if status.st_mode & 0o002:
        problem = f"{file}: every user of this machine can change it"
        raise CheckpointError(problem, f"chmod o-w {file}, if you trust what is there")
    return status.st_size
