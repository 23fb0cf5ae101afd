"""Refuse folders and files that other users of the machine can change or replace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterctl.wire import saved
from trainer.errors import CheckpointError


@contextmanager
def refusing() -> Iterator[None]:
    """Raise a CheckpointError for what the shared reader of checkpoints refuses."""
    try:
        yield
    except saved.Damaged as error:
        tensor = f" (tensor {error.tensor})" if error.tensor else ""
        raise CheckpointError(f"{error.problem}{tensor}", error.remedy) from None


def check_access(folder: Path) -> None:
    """Refuse a folder that every user may change: its hashes would prove nothing."""
    try:
        with refusing():
            saved.check_access(str(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None


def check_file(file: Path) -> int:
    """Return the size of a regular file; refuse links, which may lead out of the folder, and open permissions."""
    with refusing():
        return saved.size_of(str(file))
