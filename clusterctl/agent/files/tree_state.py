"""Compute one hash for the state of a folder from the output of `find`: /bin/sh can compare it without an agent.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import hashlib
import os
from typing import Dict

from clusterctl.agent.files import tree_cache
from clusterctl.agent.files.tree_cache import CacheEntry

# Name, kind, mode and target, size, time of the last change and inode: any change of a file changes the last two.
FORMAT = r"%P\0%y%m %l\0%s %C@ %i\0"
NOTHING = ""
# Bytes of the longest path.
PATH_MAX = 4096


def path_of(workdir: str, dest: str) -> str:
    """Return the file that keeps the state of what was pushed to `dest`, as the launcher names it."""
    return os.path.join(workdir, "trees", name_of(dest))


def name_of(dest: str) -> str:
    return hashlib.sha256(dest.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".look"


def state(path: str) -> str:
    """Return the hash of a folder or file as it is now; NOTHING if this node's `find` cannot report it."""
    hear, tell = os.pipe()
    try:
        argv = ["find", "-H", path, "-printf", FORMAT]
        actions = [(os.POSIX_SPAWN_DUP2, tell, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        finder = os.posix_spawnp("find", argv, {**os.environ, "LC_ALL": "C"}, file_actions=actions)
    except OSError:
        os.close(hear)
        return NOTHING
    finally:
        os.close(tell)
    digest, first = hashlib.sha256(), b""
    with open(hear, "rb", buffering=0) as file:
        while True:
            piece = file.read(1 << 20)
            if not piece:
                break
            digest.update(piece)
            first = first if len(first) > PATH_MAX else first + piece
    os.waitpid(finder, 0)
    return digest.hexdigest() if _is_understood(path, first) else NOTHING


def _is_understood(path: str, output: bytes) -> bool:
    """Return True if the first line is as expected: another `find` may read the format differently."""
    parts = output.split(b"\0", 3)
    if len(parts) < 4:
        # The folder does not exist, or `find` knows no -printf.
        return False
    try:
        present = os.stat(path)
    except OSError:
        return False
    name, _, numbers, _ = parts
    size, _, rest = numbers.partition(b" ")
    changed, _, inode = rest.partition(b" ")
    whole, _, fraction = changed.partition(b".")
    return (
        not name
        and (size, inode) == (b"%d" % present.st_size, b"%d" % present.st_ino)
        and whole + fraction[:9] == b"%d" % present.st_ctime_ns
    )


def keep(path: str, tree: str, reported: str, dest: str, rows: Dict[str, CacheEntry], at: int) -> None:
    """Record that `dest` held this tree with a state at a time (ns).

    The state was taken before the files were read, and after the last change to any of them.
    """
    # As a shell reads it from a line.
    is_a_word = dest == dest.strip() and "\n" not in dest
    if (
        reported == NOTHING
        or not is_a_word
        or not all(tree_cache.is_settled(entry.ctime, at) for entry in rows.values())
    ):
        return
    aside = f"{path}.{os.getpid()}.aside"
    with open(aside, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{tree} {reported} {dest}\n")
    os.replace(aside, path)
