"""Starts one process of a sandbox: `python -I -S sandbox_start.py RECORD NAME COMMAND...`.

The process writes down who it is before it becomes the daemon, so that there is no moment in which a
daemon runs and no record of it exists, however abruptly its caller ends. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36


def start_time(pid: int) -> str:
    """When a process started, as the kernel counts it: with the pid it names one for good. "" when ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()
        # Field 22, counted from the state behind the name.
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        if Path("/proc/self/stat").exists():
            return ""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def boot_id() -> str:
    """This boot of the machine; "" where the system has no such name (start times hold the date there)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def main(argv: list[str]) -> int:
    """Leave the caller's session, write the record, become the command."""
    record, name, *command = argv
    # Closes at exec, or when the child dies: the caller then goes on.
    started, starting = os.pipe()
    if os.fork():
        os.close(starting)
        os.read(started, 1)
        return 0
    os.setsid()
    _adopt_orphans()
    _write_record(record, name, command)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


def _adopt_orphans() -> None:
    """Keep what this process starts below it even when detached twice; exec keeps this, a fork does not."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _write_record(record: str, name: str, command: list[str]) -> None:
    pid = os.getpid()
    identity = {"name": name, "pid": pid, "start_time": start_time(pid), "boot_id": boot_id()}
    aside = f"{record}.{pid}"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump({**identity, "argv": command}, file)
    os.replace(aside, record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
