"""What this node's kernel said about processes that ended: killed for memory, segmentation faults, devices."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any, Dict, List, Optional, Tuple

from clusterctl.agent.request import Request

BEFORE, AFTER = 10.0, 2.0  # seconds around a process's end: a device may fall silent well before
AT_ONCE = 2.0  # seconds around a kill for memory that names another pid: our own, in a container
MOST = 10  # lines a process
KILL = 9
WORTH = re.compile(
    r"oom-kill|out of memory|killed process|segfault|general protection|traps:|xid|machine check"
    r"|hardware error|i/o error|blocked for more than|davinci|devdrv",
    re.IGNORECASE,
)
OOM = re.compile(r"oom-kill|out of memory|killed process", re.IGNORECASE)
KILLED = re.compile(r"killed process (\d+)", re.IGNORECASE)
PID = re.compile(r"\bpid[=: ](\d+)|process (\d+)\b|\[(\d+)\]: segfault|traps: \S+\[(\d+)\]", re.IGNORECASE)


def evidence(request: Request) -> Dict[str, Any]:
    """By pid: the kernel's lines on it, and whether it was killed since memory ran out.

    In a container the kernel's pids are others than ours; there a kill for memory at the same time counts for
    a process that ended by SIGKILL.
    """
    messages = kernel_messages()
    found = {}
    for one in request.need("ended", list):
        if isinstance(one, dict) and isinstance(one.get("pid"), int):
            found[str(one["pid"])] = about(one["pid"], float(one["monotonic"]), one.get("signal"), messages)
    return found


def about(pid: int, ended: float, number: Optional[int], messages: List[Tuple[float, str]]) -> Dict[str, Any]:
    lines, oom = [], False
    for when, text in messages:
        if not ended - BEFORE <= when <= ended + AFTER or not WORTH.search(text):
            continue
        named = [int(group) for groups in PID.findall(text) for group in groups if group]
        if OOM.search(text):
            mine = number == KILL and (pid in named or abs(when - ended) < AT_ONCE)
            oom = oom or (mine and bool(KILLED.search(text)))
        else:
            mine = not named or pid in named
        if mine:
            lines.append(text)
    return {"oom": oom, "kernel": lines[-MOST:]}


def kernel_messages() -> List[Tuple[float, str]]:
    """Seconds since boot and text of each; empty where this login may not read them."""
    try:
        return _read_kmsg()
    except OSError:
        return _ask_dmesg()


def _read_kmsg() -> List[Tuple[float, str]]:
    found: List[Tuple[float, str]] = []
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(fd, 16384)
            except BlockingIOError:
                return found
            except BrokenPipeError:
                continue  # overwritten while it was read; the next is there
            if not record:
                return found
            head, _, text = record.decode("utf-8", "replace").partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit():
                found.append((int(fields[2]) / 1e6, text.split("\n", 1)[0]))
    finally:
        os.close(fd)


def _ask_dmesg() -> List[Tuple[float, str]]:
    try:
        done = subprocess.run(["dmesg"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    found = [re.match(r"\[\s*(\d+\.\d+)\] (.*)", line) for line in lines]
    return [(float(match[1]), match[2]) for match in found if match]
