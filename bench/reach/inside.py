"""Measure the memory and threads of processes; contains the programs that bench/reach runs over open connections."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class Watched:
    """The peak memory, threads and processes of a process and its children, sampled every 50 ms."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.rss = self.pss = 0.0
        self.threads = self.processes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _watch(self) -> None:
        while Path(f"/proc/{self.pid}/statm").exists() and _held(self.pid)[2]:
            family = list(_family(self.pid))
            held = [_held(pid) for pid in family]
            self.rss = max(self.rss, sum(usage[0] for usage in held))
            self.pss = max(self.pss, sum(usage[1] for usage in held))
            self.threads = max(self.threads, sum(usage[2] for usage in held))
            self.processes = max(self.processes, len(family))
            time.sleep(0.05)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _family(int(child))


def _held(pid: int) -> tuple[float, float, int]:
    """Return resident MB, proportional MB, and the number of threads of a process; zeros if it has ended."""
    try:
        rolled = Path(f"/proc/{pid}/smaps_rollup").read_text()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0.0, 0.0, 0
    values = dict(re.findall(r"^(Rss|Pss):\s+(\d+) kB", rolled, re.MULTILINE))
    return int(values.get("Rss", 0)) / 1024, int(values.get("Pss", 0)) / 1024, threads


TEN = """
import resource, sys, time
from pathlib import Path
from clusterctl.inventory import cluster as inventory
from clusterctl.backends.reach import transport_to
from clusterctl.transport.fanout import Connections

cluster = inventory.load(Path(sys.argv[1])).select(sys.argv[2])
def spent():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
with Connections(transport_to(cluster), len(cluster.nodes)) as connections:
    for outcome in connections.on_each(cluster.nodes, lambda node, link: link.hello()):
        outcome.get()
    began, busy = time.perf_counter(), spent()
    for _ in range(10):
        for outcome in connections.on_each(cluster.nodes, lambda node, link: link.run(["hostname"])):
            assert outcome.get().ok
    print(time.perf_counter() - began, spent() - busy)
"""

IDLE = """
import re, sys
from pathlib import Path
from clusterctl.inventory import cluster as inventory
from clusterctl.backends.reach import transport_to
from clusterctl.transport.fanout import Connections

cluster = inventory.load(Path(sys.argv[1])).select(sys.argv[2])
with Connections(transport_to(cluster)) as connections:
    link = connections.of(cluster.nodes[0])
    pid = link.hello().pid
    rolled = link.run(["cat", f"/proc/{pid}/smaps_rollup"]).text
    held = {name: int(kb) / 1024 for name, kb in re.findall(r"^(Rss|Pss|Private_\\w+):\\s+(\\d+) kB", rolled, re.M)}
    own = sum(value for name, value in held.items() if name.startswith("Private"))
    print(f"{held['Rss']:.1f} MB resident, {held['Pss']:.1f} MB of its own share, {own:.1f} MB private")
"""
