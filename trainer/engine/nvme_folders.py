"""The folders in which DeepSpeed keeps weights and moments (offload to NVMe): one for each run.

DeepSpeed's files have the same names in every run. A run that is killed leaves them. Each rank therefore holds a lock
on the folder of its run, which ends with its process, and a start removes the folders that no process holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.deepspeed import parts_on_disk
from trainer.errors import InputError

IN_USE = "clusterctl-in-use"
"""The locked file in the folder of a run. A folder without it is never removed."""


def folders(given: Mapping[str, Any], run: str) -> dict[str, Mapping[str, Any]]:
    """Return the settings for parts that DeepSpeed keeps in files, with the run's own folder."""
    return {
        part: {**own, "nvme_path": str(Path(own["nvme_path"]) / run)}
        for part, own in parts_on_disk(given).items()
    }


class RunFolders:
    """The folders of a run on this node; each rank holds a lock on them."""

    def __init__(self, given: Mapping[str, Any], run: str, rank: int) -> None:
        """Remove files of ended runs, also of an earlier attempt of this one, and lock the folders of `run`."""
        self.rank = rank
        self.held: dict[Path, int] = {}
        for place in sorted({Path(own["nvme_path"]) for own in parts_on_disk(given).values()}):
            for file in place.glob(f"*/{IN_USE}"):
                if file.parent.name != run:
                    _remove_if_unused(file.parent)
            try:
                self.held[place / run] = _hold(place / run)
            except OSError as error:
                raise InputError(
                    f"nvme_path: files in {place / run} cannot be written: {error.strerror}",
                    "name a folder on the node's own disk that you may write to",
                ) from error

    def remove(self) -> None:
        """Remove this rank's files, and the folder with the last rank of the node; other ranks may use theirs."""
        for folder, file in self.held.items():
            for own in _folders_of_ranks(folder, self.rank):
                shutil.rmtree(own)
            os.close(file)
            _remove_if_unused(folder)
        self.held = {}


def _folders_of_ranks(folder: Path, rank: int | None = None) -> Iterator[Path]:
    return folder.glob(f"zero_stage_3/*/rank{'*' if rank is None else rank}")


def _hold(folder: Path) -> int:
    """Return the file whose lock this process shares; the first holder removes files of an earlier attempt."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = _open(folder, os.O_CREAT)
        except FileNotFoundError:
            # Another run's start removed the folder that had no holder yet.
            continue
        if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for left in _folders_of_ranks(folder):
                shutil.rmtree(left)
        fcntl.flock(file, fcntl.LOCK_SH)
        if _is_there(file, folder):
            return file
        os.close(file)


def _remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that no process holds; another user's folder stays."""
    try:
        file = _open(folder)
    except OSError:
        return
    try:
        if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_there(file, folder):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)


def _open(folder: Path, flags: int = 0) -> int:
    return os.open(folder / IN_USE, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    return True


def _is_there(file: int, folder: Path) -> bool:
    """Return whether an open file is still the one in the folder."""
    try:
        named = os.stat(folder / IN_USE)
    except OSError:
        return False
    return os.path.samestat(os.fstat(file), named)
