"""Find the socket of this user's keeper, and check who owns it."""

from __future__ import annotations

import os
import stat
import sys
import zlib
from socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from clusterctl.environment import environment

LINKS, LOCK, LOG = ".links", ".lock", ".log"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Bytes of each of pid, uid and gid, as SO_PEERCRED gives them.
WORD = 4
# The namespaces by which containers on one machine differ.
INSIDE = ("net", "mnt", "user")


class WrongPlace(Exception):
    """Raised for a folder or a peer that another user may control: nothing is sent to it."""


def folder() -> str | None:
    """Return the folder of this user's keepers; None if the user has no private folder."""
    variables = environment()
    if variables.get("XDG_RUNTIME_DIR", "").startswith("/"):
        return os.path.join(variables["XDG_RUNTIME_DIR"], "clusterctl")
    home = variables.get("HOME", "")
    cache = variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return os.path.join(cache, "clusterctl", "keeper") if cache.startswith("/") else None


def opened(path: str) -> int:
    """Return a descriptor of the folder, which nobody can replace afterwards.

    Raise FileNotFoundError or WrongPlace.
    """
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
    """Return the name of the keeper for this command: a hash of everything that can change its results.

    This includes the program's code and interpreter, the home and settings folders, Python's environment
    variables, and the network, mount and user namespaces. Files are represented by modification time and
    size, which takes 0.4 ms.
    """
    variables = environment()
    settings = [f"{key}={value}" for key, value in sorted(variables.items()) if key.startswith("PYTHON")]
    settings += [
        variables.get("HOME", ""),
        variables.get("XDG_CONFIG_HOME", ""),
        sys.executable,
        sys.version,
        *_code(PACKAGE),
    ]
    for namespace in INSIDE:
        try:
            settings.append(os.readlink(f"/proc/self/ns/{namespace}"))
        except OSError:
            settings.append("")
    text = "\0".join(settings).encode("utf-8", "surrogateescape")
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
    """Return a socket's path by way of a folder descriptor; it is short even if the folder's path is long."""
    return f"/proc/self/fd/{handle}/{file}"


def connected(handle: int, file: str) -> socket:
    """Return a connection to a keeper of this user; raise OSError if none listens."""
    line = socket(AF_UNIX, SOCK_STREAM)
    try:
        line.connect(address(handle, file))
        check_peer(line)
    except BaseException:
        line.close()
        raise
    return line


def check_peer(line: socket) -> int:
    """Return the process id of the peer; raise WrongPlace if the peer belongs to another user."""
    credentials = line.getsockopt(SOL_SOCKET, SO_PEERCRED, 3 * WORD)
    pid, uid = (int.from_bytes(credentials[start : start + WORD], sys.byteorder) for start in (0, WORD))
    if uid != os.getuid():
        raise WrongPlace(f"the other end is of user {uid}, not of {os.getuid()}")
    return pid
