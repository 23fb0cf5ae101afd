"""Cache inventories whose files did not change, for a process that runs many commands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from clusterctl.errors import ClusterctlError
from clusterctl.hostfile import detect
from clusterctl.inventory.cluster import Cluster

# Seconds. A file that changed more recently may change again within one tick of its time stamp.
SETTLED = 2.0
MOST = 8


class Which(NamedTuple):
    """One inventory: folder, file name, and the kind of its slots."""

    folder: str
    file: str
    kind: str


Stamp = tuple[int, int, int, int]


class Inventories:
    """Clusters by the files that they were read from; only a keeper stores any."""

    def __init__(self) -> None:
        self._known: dict[Which, tuple[Stamp, Cluster]] = {}
        self.on_read: Callable[[Which], None] = lambda which: None
        """Called for each inventory that was not stored."""

    def load(self, file: Path, kind: str) -> Cluster:
        """Return the inventory as `detect.load` does."""
        which = Which(os.getcwd(), str(file), kind)
        known = self._known.get(which)
        if known is not None and known[0] == _stamp(file) and _keys_are_there(known[1]):
            return known[1]
        cluster = detect.load(file, kind)
        self.on_read(which)
        return cluster

    def remember(self, which: Which) -> None:
        """Read an inventory in its folder for later commands, which report its faults themselves."""
        before = os.getcwd()
        try:
            os.chdir(which.folder)
            stamp = _stamp(Path(which.file))
            if stamp is None or time.time() - stamp[0] / 1e9 < SETTLED:
                return
            cluster = detect.load(Path(which.file), which.kind)
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[which] = (stamp, cluster)
        except (OSError, ClusterctlError):
            self._known.pop(which, None)
        finally:
            os.chdir(before)


@lru_cache(maxsize=1)
def inventories() -> Inventories:
    """Return the cache of this process."""
    return Inventories()


def _keys_are_there(cluster: Cluster) -> bool:
    """Return whether every identity file of the cluster exists."""
    return all(os.path.isfile(os.path.expanduser(key)) for key in {node.key for node in cluster.nodes} if key)


def _stamp(file: Path) -> Stamp | None:
    """Return a fingerprint (mtime, size, inode, device) of a regular file, else None."""
    try:
        about = file.stat()
    except OSError:
        return None
    if not file.is_file():
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino, about.st_dev
