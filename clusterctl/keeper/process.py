"""The keeper's process: a user's background process that keeps connections open between commands."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket

from clusterctl.keeper import address as place
from clusterctl.keeper.clients import welcome
from clusterctl.keeper.links import LinkHolder
from clusterctl.transport.open_files import raise_limit

BACKLOG = 128
# Seconds between two searches for idle links.
LOOK = 1.0


def main(idle: str, ready: str) -> None:
    """Run the keeper of this user and code until no command has used it for `idle` seconds; write to the descriptor
    `ready` once it listens.
    """
    path = place.folder()
    assert path is not None
    folder, name = place.opened(path), place.name()
    lock = _lock(place.address(folder, name + place.LOCK))
    if lock is None:
        # Another keeper is running or about to start.
        return
    listening = _listen(folder, name + place.LINKS)
    os.write(int(ready), b"ready\n")
    os.close(int(ready))
    _serve(listening, float(idle))
    for kind in (place.LINKS, place.LOG, place.LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place.address(folder, name + kind))
    # From now on a new keeper may start.
    os.close(lock)


def _lock(path: str) -> int | None:
    """Return the descriptor that holds the keeper's lock; None if another process holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Otherwise a keeper that has just ended has removed this file.
        if os.fstat(lock).st_ino == os.stat(path).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _listen(folder: int, file: str) -> socket.socket:
    """Return a listening socket that only this user can open; replace one left by a killed keeper."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place.address(folder, file))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(place.address(folder, file))
    finally:
        os.umask(before)
    listening.listen(BACKLOG)
    return listening


def _serve(listening: socket.socket, idle: float) -> None:
    """Hold links until no command uses them for `idle` seconds, or a signal ends the keeper."""
    holder = LinkHolder(idle)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, holder.stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_limit()
    while not holder.is_over():
        if select.select([listening], [], [], LOOK)[0]:
            welcome(listening.accept()[0], holder)
        holder.close_idle()
    listening.close()
    holder.close()
