"""Kills for want of memory, by the counter that the kernel keeps of them for each control group.

The kernel's log is not for every login's eyes, and in a container it names other pids; this counter is for everybody,
and the ranks are in the supervisor's group. Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

from clusterctl.agent.processes import text_of

ROOT = "/sys/fs/cgroup"
RECENT = 2.0  # seconds before a rank's end in which a kill that was counted is its own


class Kills:
    """The counter of this process's own group, looked at again and again."""

    def __init__(self, now: float, path: Optional[str] = None) -> None:
        self.path = counter_of(text_of("/proc/self/cgroup")) if path is None else path
        self.seen = read(self.path)
        self.before = self.seen
        self.rose = now - 2 * RECENT

    def look(self, now: float) -> None:
        """Note when the counter rose; a look costs 35 us."""
        found = read(self.path)
        if found.get("oom_kill", 0) > self.seen.get("oom_kill", 0):
            self.before, self.rose = self.seen, now
        self.seen = found

    def of(self, now: float) -> Dict[str, Any]:
        """What is recorded of a process that SIGKILL just ended: nothing, unless the counter rose with it."""
        self.look(now)
        if now - self.rose > RECENT:
            return {}
        count = self.seen.get("oom_kill", 0) - self.before.get("oom_kill", 0)
        limit = self.seen.get("oom", 0) > self.before.get("oom", 0)
        what = "Memory cgroup out of memory: " if limit else ""
        return {"oom": True, "kernel": [f"{what}{count} killed for want of memory, by {self.path}"]}


def counter_of(groups: str, root: str = ROOT) -> str:
    """The file that counts, out of /proc/self/cgroup; empty where there is none.

    Version 2 has `memory.events`, version 1 `memory.oom_control`. In a container the group's own path may lie outside
    of what is mounted there: then the mount's root is the container's group.
    """
    for line in groups.splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if not names:
            places, name = [root, os.path.join(root, "unified")], "memory.events"
        elif "memory" in names.split(","):
            places, name = [os.path.join(root, "memory"), os.path.join(root, names)], "memory.oom_control"
        else:
            continue
        for place in places:
            for folder in (place + path.rstrip("/"), place):
                if os.access(os.path.join(folder, name), os.R_OK):
                    return os.path.join(folder, name)
    return ""


def read(path: str) -> Dict[str, int]:
    """The counters in such a file."""
    rows = (line.split() for line in text_of(path).splitlines()) if path else ()
    found = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
    hits = text_of(os.path.join(os.path.dirname(path), "memory.failcnt")).strip() if "oom" not in found and path else ""
    return {**found, "oom": int(hits)} if hits.isdigit() else found  # version 1 counts there that the limit was hit
