"""Inventories that were read before and did not change, for a process that runs many commands."""

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

# Seconds: a file that changed later than that may change again within its clock's tick.
SETTLED = 2.0
MOST = 8


class Which(NamedTuple):
    """One inventory: where it was read from, its name there, and what its slots are."""

    folder: str
    file: str
    kind: str


Stamp = tuple[int, int, int, int]


class Inventories:
    """Clusters by what they were read from; only a keeper remembers any."""

    def __init__(self) -> None:
        self._known: dict[Which, tuple[Stamp, Cluster]] = {}
        self.on_read: Callable[[Which], None] = lambda which: None
        """Hears of each that was not known."""

    def load(self, file: Path, kind: str) -> Cluster:
        """As `hostfile_any.load`."""
        which = Which(os.getcwd(), str(file), kind)
        known = self._known.get(which)
        if known is not None and known[0] == _stamp(file) and _keys_are_there(known[1]):
            return known[1]
        cluster = detect.load(file, kind)
        self.on_read(which)
        return cluster

    def remember(self, which: Which) -> None:
        """Read one for those that come later; what can't be read is theirs to tell. Goes to its folder and back."""
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
    """This process's own."""
    return Inventories()


def _keys_are_there(cluster: Cluster) -> bool:
    """An inventory is refused where an identity file is missing."""
    return all(os.path.isfile(os.path.expanduser(key)) for key in {node.key for node in cluster.nodes} if key)


def _stamp(file: Path) -> Stamp | None:
    """What changes with a file; None where it is none that can be read twice."""
    try:
        about = file.stat()
    except OSError:
        return None
    if not file.is_file():
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino, about.st_dev
