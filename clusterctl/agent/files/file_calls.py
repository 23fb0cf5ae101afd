"""Write, copy, exchange and remove files and folders of a tree."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Dict, Optional, Union

from clusterctl.agent.files.tree import Entry

Data = Union[bytes, memoryview]

AT_FDCWD, RENAME_EXCHANGE = -100, 2
# Shares one file's blocks with another one's until either is written.
FICLONE = 0x40049409


def write_at(handle: int, data: Data, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


def status_of(path: str) -> Optional[os.stat_result]:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def foreign_link(path: str) -> str:
    """Return the part of a path that is another user's link in a folder that everybody may write to, or "".

    The kernel follows such a link in the middle of a path, to wherever that user wants.
    """
    # In a user namespace, root is whoever owns `/`.
    users, above = (0, os.geteuid(), os.stat("/").st_uid), os.path.dirname(path)
    # A path may begin with two slashes.
    while path != above:
        status = status_of(path)
        is_theirs = status is not None and stat.S_ISLNK(status.st_mode) and status.st_uid not in users
        if is_theirs and os.stat(above).st_mode & 0o002:
            return path
        path, above = above, os.path.dirname(above)
    return ""


def nearest_folder(path: str) -> str:
    """Return the folder itself, or the nearest existing folder above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def matches_entry(root: str, entry: Entry) -> bool:
    """Return True if a name below `root` has its entry's kind, and mode or target; its content is not compared."""
    status = status_of(os.path.join(root, entry.path))
    if status is None:
        return False
    if entry.kind == "l":
        return stat.S_ISLNK(status.st_mode) and os.readlink(os.path.join(root, entry.path)) == entry.content
    kind = stat.S_ISDIR(status.st_mode) if entry.kind == "d" else stat.S_ISREG(status.st_mode)
    mode = entry.mode | 0o700 if entry.kind == "d" else entry.mode
    return kind and stat.S_IMODE(status.st_mode) & 0o777 == mode


def is_plain_folder(root: str, folder: str, known: Dict[str, bool]) -> bool:
    """Return True if no link leads to a folder below `root` on the way; `known` caches the results."""
    if folder not in known:
        above = is_plain_folder(root, folder.rpartition("/")[0], known)
        status = status_of(os.path.join(root, folder)) if above else None
        known[folder] = status is not None and stat.S_ISDIR(status.st_mode)
    return known[folder]


def make_folder(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        # An earlier push was interrupted, or another one is running.
        return


def copy_file(source: str, target: str) -> None:
    """Copy a file without linking it: a program that still writes into the old tree must not change the new one.

    If the file system can share blocks until one of them is written, it does.
    """
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb", buffering=0) as new, open(source, "rb", buffering=0) as present:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, present.fileno())
        except OSError:
            # Imported here, because it takes 2 ms of every push.
            import shutil

            shutil.copyfileobj(present, new, 1 << 20)


def remove_tree(path: str) -> None:
    """Remove a tree even if a folder in it is not writable."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    import shutil

    shutil.rmtree(path)


def exchange(first: str, second: str) -> bool:
    """Swap two names in one step (Linux 3.15 and newer, on most file systems); return False if that fails."""
    # Imported here, because it takes 2 ms of every agent's start.
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is None:
        return False
    return bool(call(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0)
