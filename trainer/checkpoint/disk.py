"""Convert disk errors to messages with the path, the reason and a remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import TrainingFailed

REMEDIES = {
    errno.EROFS: "the disk is mounted read-only: mount it for writing, or choose another folder",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ESTALE: "the network disk was mounted again meanwhile: start the run again",
    errno.EIO: "the disk reports a fault: look at `dmesg` on this node",
    errno.ENOTDIR: "a file stands where a folder is needed: remove it",
}


@contextmanager
def disk_failures(folder: Path, need: int = 0) -> Iterator[None]:
    """Turn an OSError of the block into a TrainingFailed; `need`: bytes that the checkpoint takes."""
    try:
        yield
    except OSError as error:
        raise TrainingFailed(
            f"{folder}: cannot be saved: {error.strerror or error}", remedy(error, folder, need)
        ) from None


def remedy(error: OSError, folder: Path, need: int) -> str:
    """Return what a user can do against a failure to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _room(error, folder, need)
    return REMEDIES.get(error.errno or 0, "look at the disk of this folder")


def _room(error: OSError, folder: Path, need: int) -> str:
    where = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    status = os.statvfs(where)
    if error.errno == errno.EDQUOT:
        return "your disk quota is used up: remove files, or lower train.save.keep"
    if status.f_files and not status.f_favail:
        return "the disk has no room for more files (inodes): remove some, or choose another folder"
    free = status.f_bavail * status.f_frsize
    room = f"the checkpoint needs {need / 1e6:,.0f} MB, the disk has {free / 1e6:,.0f} MB left"
    return f"{room}: make room, or lower train.save.keep"
