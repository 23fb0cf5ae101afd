"""Start one process of a sandbox: `python -I -S spawn.py RECORD NAME COMMAND...`.

The process writes its record before it becomes the daemon, so no daemon ever runs without a record, even if the caller
is killed. Standard library only.
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
    """Return the kernel's start time of a process, which identifies it together with the pid; "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()
        # Field 22 of stat; the fields after the name start with the state, field 3.
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        if Path("/proc/self/stat").exists():
            return ""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip()


def boot_id() -> str:
    """Return the id of this boot; "" on systems without one, where start times contain the date."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def main(argv: list[str]) -> int:
    """Start a new session, write the record, and execute the command."""
    record, name, *command = argv
    # Closed by exec, or when the child ends: the caller then continues.
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
    """Become the parent of orphaned descendants, also of daemons; exec keeps this property, fork does not."""
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
