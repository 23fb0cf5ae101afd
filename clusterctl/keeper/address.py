"""Where a keeper's sockets are, whose they are, and what they are named by.

The fast door imports this before anything else, so it takes of the standard library what costs nothing: `socket`
and `struct` around their C halves would bring enum, selectors and more, which is 8 ms of a command's 40.
"""

from __future__ import annotations

import os
import stat
import sys
import zlib
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from clusterctl.environment import environment

DOOR, LINKS, LOCK, LOG = ".door", ".links", ".lock", ".log"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Bytes of each of pid, uid and gid, as SO_PEERCRED gives them.
WORD = 4
# What another container on this machine does not share.
INSIDE = ("net", "mnt", "user")


class WrongPlace(Exception):
    """A folder or a peer that is not this user's alone: nothing is sent to it."""


def folder() -> str | None:
    """The folder of this user's keepers; None where the user has no place of their own."""
    said = environment()
    if said.get("XDG_RUNTIME_DIR", "").startswith("/"):
        return os.path.join(said["XDG_RUNTIME_DIR"], "clusterctl")
    home = said.get("HOME", "")
    cache = said.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return os.path.join(cache, "clusterctl", "keeper") if cache.startswith("/") else None


def opened(path: str) -> int:
    """The folder as a descriptor, which nobody can swap any more; FileNotFoundError, or WrongPlace with words."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise WrongPlace(f"{path}: {problem.strerror}; it must be a folder, and no link to one") from None
    about = os.fstat(handle)
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        os.close(handle)
        raise WrongPlace(
            f"{path}: owner {about.st_uid}, mode {stat.S_IMODE(about.st_mode):04o}; "
            f"it must be yours (user {os.getuid()}) with mode 0700"
        )
    return handle


def name() -> str:
    """What a keeper is named by: all that makes its answers differ from those of a program started now.

    Its own code and interpreter, the home and settings folders that it reads, Python's own variables, and the
    network, files and users that it is among. The time and size of each file stand for the code: 0.4 ms.
    """
    said = environment()
    kept = [f"{key}={value}" for key, value in sorted(said.items()) if key.startswith("PYTHON")]
    kept += [
        said.get("HOME", ""),
        said.get("XDG_CONFIG_HOME", ""),
        sys.executable,
        sys.version,
        *_code(PACKAGE),
    ]
    for one in INSIDE:
        try:
            kept.append(os.readlink(f"/proc/self/ns/{one}"))
        except OSError:
            kept.append("")
    text = "\0".join(kept).encode("utf-8", "surrogateescape")
    return f"{zlib.crc32(text):08x}{zlib.adler32(text):08x}"


def _code(folder: str) -> list[str]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                about = entry.stat()
                found.append(f"{entry.path} {about.st_size} {about.st_mtime_ns}")
            elif "." not in entry.name and entry.name != "__pycache__":
                found += _code(entry.path)
    return sorted(found)


def address(handle: int, file: str) -> str:
    """A socket's path in an opened folder: of a length that fits, whatever the folder's own is."""
    return f"/proc/self/fd/{handle}/{file}"


def connected(handle: int, file: str) -> socket:
    """A connection to a keeper of this very user; OSError where nobody listens."""
    line = socket(AF_UNIX, SOCK_STREAM)
    try:
        line.connect(address(handle, file))
        check_peer(line)
    except BaseException:
        line.close()
        raise
    return line


def check_peer(line: socket) -> int:
    """The process id at the other end, which must be of this user."""
    said = line.getsockopt(SOL_SOCKET, SO_PEERCRED, 3 * WORD)
    pid, uid = (int.from_bytes(said[start : start + WORD], sys.byteorder) for start in (0, WORD))
    if uid != os.getuid():
        raise WrongPlace(f"the other end is of user {uid}, not of {os.getuid()}")
    return pid
