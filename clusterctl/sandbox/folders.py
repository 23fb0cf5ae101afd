"""Make, lock and remove the folder of a sandbox."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clusterctl.errors import UsageError
from clusterctl.sandbox.layout import Layout

LOCK_WITHIN = 15.0


@contextmanager
def own_folder(layout: Layout) -> Iterator[bool]:
    """Make the folder of a sandbox and yield whether it is new; remove a new one if no sandbox was started."""
    made = not layout.directory.exists()
    try:
        with contextlib.suppress(FileExistsError):
            layout.directory.mkdir(mode=0o700)
        if not layout.directory.is_dir():
            raise UsageError(f"{layout.directory} is not a folder", "choose another --dir")
        if not layout.state.exists() and is_foreign(layout):
            raise UsageError(f"{layout.directory} is not empty and not a sandbox", "choose another --dir")
        yield made
    finally:
        if made and not layout.state.exists() and layout.directory.exists():
            layout.lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                layout.directory.rmdir()


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Allow one `up` or `down` at a time in a folder; the kernel releases the lock of a process that ends."""
    deadline = time.monotonic() + LOCK_WITHIN
    while (file := _try_lock(layout)) is None:
        if time.monotonic() > deadline:
            problem = f"another `sandbox up` or `down` is running in {layout.directory}"
            raise UsageError(problem, "wait for it, or stop it")
        time.sleep(0.05)
    with file:
        yield


def _try_lock(layout: Layout) -> IO[str] | None:
    try:
        file = layout.lock.open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file.fileno(), layout.lock):
            return file
    except BlockingIOError:
        pass
    except FileNotFoundError:
        raise UsageError(f"{layout.directory} was removed meanwhile", "try again") from None
    file.close()
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path: `down` may have removed the lock file."""
    mine = os.fstat(descriptor)
    return os.path.samestat(mine, path.stat())


def is_foreign(layout: Layout) -> bool:
    """Return whether a folder without a state file contains files that `up` does not create before the state file."""
    # The second one is an incomplete state file.
    ours = (layout.lock.name, f".{layout.state.name}.")
    return not all(path.name.startswith(ours) for path in layout.directory.iterdir())


def remove(path: Path) -> None:
    """Remove a file or a tree, including folders that their owner may not read or write."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    folders = [str(path)]
    while folders:
        # Before scandir, which needs the permission to read.
        os.chmod(folders[-1], 0o700)
        with os.scandir(folders.pop()) as entries:
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(path)
