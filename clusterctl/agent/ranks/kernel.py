"""Report what the kernel of a node recorded about processes that ended: out of memory, segmentation faults, devices.

Not every login may read the kernel's log, and in a container it names other pids.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional, Tuple

from clusterctl.agent.bounded import outputs_of
from clusterctl.agent.processes import text_of
from clusterctl.agent.request import Request

# Seconds before and after a process's end: a device may stop responding well before.
BEFORE, AFTER = 10.0, 2.0
# In a container, a kill for memory so many seconds from the end of a process counts for it.
AT_ONCE = 2.0
# Limit of messages for one process.
MOST = 10
# Limits of seconds and bytes for reading the kernel's messages; its buffer has a few MB at most.
DMESG_LIMIT, LARGEST = 10.0, 64 << 20
KILL = 9
WORTH = (
    r"oom-kill|out of memory|killed process|segfault|general protection|traps:|xid|machine check"
    r"|hardware error|i/o error|blocked for more than|davinci|devdrv"
)
OOM = r"oom-kill|out of memory|killed process"
KILLED = r"killed process (\d+)"
PID = r"\bpid[=: ](\d+)|process (\d+)\b|\[(\d+)\]: segfault|traps: \S+\[(\d+)\]"


def evidence(request: Request) -> Dict[str, Any]:
    """Return by pid the kernel's messages about it, and whether it was killed because memory ran out.

    In a container the kernel's pids differ from ours. There a kill for memory at the same time counts for a process
    that SIGKILL ended.
    """
    messages = kernel_messages()
    result = {}
    for entry in request.need("ended", list):
        if isinstance(entry, dict) and isinstance(entry.get("pid"), int):
            result[str(entry["pid"])] = about(
                entry["pid"], float(entry["monotonic"]), entry.get("signal"), messages
            )
    return result


def about(pid: int, ended: float, number: Optional[int], messages: List[Tuple[float, str]]) -> Dict[str, Any]:
    """Return the evidence about one process that ended at `ended` (seconds since boot) by signal `number`."""
    # Imported here, because a supervisor imports this module too, and does not need it.
    import re

    lines, oom = [], False
    for when, text in messages:
        if not ended - BEFORE <= when <= ended + AFTER or not re.search(WORTH, text, re.IGNORECASE):
            continue
        named = [int(group) for groups in re.findall(PID, text, re.IGNORECASE) for group in groups if group]
        if re.search(OOM, text, re.IGNORECASE):
            mine = number == KILL and (pid in named or abs(when - ended) < AT_ONCE)
            oom = oom or (mine and bool(re.search(KILLED, text, re.IGNORECASE)))
        else:
            mine = not named or pid in named
        if mine:
            lines.append(text)
    return {"oom": oom, "kernel": lines[-MOST:]}


def kernel_messages() -> List[Tuple[float, str]]:
    """Return seconds since boot and text of each message; empty if this login may not read them."""
    try:
        return _read_kmsg()
    except OSError:
        return _run_dmesg()


def _read_kmsg() -> List[Tuple[float, str]]:
    result: List[Tuple[float, str]] = []
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        deadline = time.monotonic() + DMESG_LIMIT
        while time.monotonic() < deadline:
            try:
                record = os.read(fd, 16384)
            except BlockingIOError:
                return result
            except BrokenPipeError:
                # The message was overwritten while it was read; the next one is complete.
                continue
            if not record:
                return result
            head, _, text = record.decode("utf-8", "replace").partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit():
                result.append((int(fields[2]) / 1e6, text.split("\n", 1)[0]))
        return result
    finally:
        os.close(fd)


def _run_dmesg() -> List[Tuple[float, str]]:
    import re
    import subprocess

    try:
        process = subprocess.Popen(
            ["dmesg"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return []
    out, _, ended = outputs_of(process, DMESG_LIMIT, LARGEST)
    if not ended:
        process.kill()
        process.wait()
        return []
    result = [
        re.match(r"\[\s*(\d+\.\d+)\] (.*)", line) for line in out.decode("utf-8", "replace").splitlines()
    ]
    return [(float(match[1]), match[2]) for match in result if match]


ROOT = "/sys/fs/cgroup"
# A kill that was counted so many seconds before a rank's end is its own.
RECENT = 2.0


class Kills:
    """Watches the counter of kills of this process's own control group."""

    def __init__(self, now: float, path: Optional[str] = None) -> None:
        self.path = counter_of(text_of("/proc/self/cgroup")) if path is None else path
        self.seen = read(self.path)
        self.before = self.seen
        self.rose = now - 2 * RECENT

    def check(self, now: float) -> None:
        """Check whether the counter rose, which takes 35 us."""
        result = read(self.path)
        if result.get("oom_kill", 0) > self.seen.get("oom_kill", 0):
            self.before, self.rose = self.seen, now
        self.seen = result

    def of(self, now: float) -> Dict[str, Any]:
        """Return the evidence about a process that SIGKILL just ended; empty unless the counter rose with it."""
        self.check(now)
        if now - self.rose > RECENT:
            return {}
        count = self.seen.get("oom_kill", 0) - self.before.get("oom_kill", 0)
        limit = self.seen.get("oom", 0) > self.before.get("oom", 0)
        subject = "Memory cgroup out of memory: " if limit else ""
        return {"oom": True, "kernel": [f"{subject}{count} killed because memory ran out, by {self.path}"]}


def counter_of(groups: str, root: str = ROOT) -> str:
    """Return the file with the counter, from the text of /proc/self/cgroup; an empty text if there is none.

    Version 2 has `memory.events`, version 1 `memory.oom_control`. In a container the group's own path may lie outside
    of what is mounted there: then the root of the mount is the container's group.
    """
    for line in groups.splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if not names:
            places, name = [root, os.path.join(root, "unified")], "memory.events"
        elif "memory" in names.split(","):
            places, name = [os.path.join(root, "memory"), os.path.join(root, names)], "memory.oom_control"
        else:
            continue
        for candidate in places:
            for folder in (candidate + path.rstrip("/"), candidate):
                if "\0" not in folder and os.access(os.path.join(folder, name), os.R_OK):
                    return os.path.join(folder, name)
    return ""


def read(path: str) -> Dict[str, int]:
    """Return the counters in such a file."""
    rows = (line.split() for line in text_of(path).splitlines()) if path else ()
    result = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
    hits = (
        text_of(os.path.join(os.path.dirname(path), "memory.failcnt")).strip()
        if "oom" not in result and path
        else ""
    )
    # Version 1 counts in this file how often the limit was reached.
    return {**result, "oom": int(hits)} if hits.isdigit() else result
