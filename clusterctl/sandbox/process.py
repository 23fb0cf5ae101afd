"""The processes of a sandbox: started with a record, found by it, killed with all their descendants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from clusterctl.errors import ClusterctlError
from clusterctl.sandbox import spawn

# The value is <sandbox id>/<node>, in the environment of everything that runs on a node.
MARKER = "CLUSTERCTL_SANDBOX_NODE"
# Seconds that a killed process may take to end: a write to a full disk takes longest.
GONE_WITHIN = 10.0
LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class Started:
    """A process that was started here; pid, start time and boot identify it."""

    name: str
    pid: int
    start_time: str
    boot_id: str
    argv: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """Return whether this process is still running; another process with its pid does not count."""
        same_boot = self.boot_id == spawn.boot_id()
        return same_boot and spawn.start_time(self.pid) == self.start_time


def start(
    record: Path,
    name: str,
    command: Sequence[str],
    env: dict[str, str],
    log: Path,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
) -> None:
    """Start a daemon that outlives this process; on return it is recorded and runs the command."""
    starter = [sys.executable, "-I", "-S", spawn.__file__, str(record), name]
    with log.open("ab") as out:
        done = subprocess.run(
            [*starter, *command],
            env=env,
            stdin=stdin,
            stdout=out,
            stderr=out,
            # Ctrl-C in the terminal must not reach it.
            start_new_session=True,
            check=False,
        )
    if done.returncode:
        raise ClusterctlError(f"{name} could not be started: {tail(log)}")


def read_record(path: Path) -> Started | None:
    """Return the record of a process, or None."""
    try:
        value = json.loads(path.read_text())
        argv = tuple(value.pop("argv"))
        return Started(**value, argv=argv)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def read_records(folder: Path) -> list[Started]:
    """Return every record in a folder."""
    return [record for path in sorted(folder.glob("*.json")) if (record := read_record(path))]


def tail(log: Path, lines: int = 3) -> str:
    """Return the last lines of a log, in one line."""
    with contextlib.suppress(FileNotFoundError):
        return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:]) or "its log is empty"
    return "it left no log"


@dataclass(frozen=True)
class ProcessEntry:
    """One row of the process table."""

    parent: int
    group: int


def table() -> dict[int, ProcessEntry]:
    """Return the running processes by pid, without zombies."""
    if LINUX:
        return dict(_linux_table())
    command = ["ps", "-axo", "pid=,ppid=,pgid=,stat="]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    rows = (line.split() for line in shown.stdout.splitlines())
    return {
        int(row[0]): ProcessEntry(int(row[1]), int(row[2]))
        for row in rows
        if len(row) > 3 and row[3][0] != "Z"
    }


def _linux_table() -> Iterator[tuple[int, ProcessEntry]]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent, group = stat.rpartition(b")")[2].split()[:3]
        if state not in (b"Z", b"X"):
            yield int(name), ProcessEntry(int(parent), int(group))


def below(roots: set[int]) -> dict[int, ProcessEntry]:
    """Return these processes and all their descendants."""
    rows = table()
    found = roots & rows.keys()
    grown = True
    while grown:
        children = {pid for pid, row in rows.items() if row.parent in found}
        grown = not children <= found
        found |= children
    return {pid: rows[pid] for pid in found}


def marked(mark: str) -> set[int]:
    """Return the processes whose environment has a mark: `<id>/<node>` for a node, `<id>/` for a whole sandbox."""
    wanted = f"{MARKER}={mark}".encode()

    def fits(entry: bytes) -> bool:
        return entry.startswith(wanted) if mark.endswith("/") else entry == wanted

    return {pid for pid in (table() if LINUX else ()) if any(map(fits, _environment(pid)))}


def named(name: str) -> set[int]:
    """Return the processes with this name. Never kill processes by name."""
    return {pid for pid in (table() if LINUX else ()) if _name(pid) == name}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        # It has ended, or belongs to another user.
        return []


def end(find: Callable[[], set[int]]) -> int:
    """Kill the processes that `find` returns, with all descendants, and wait for their end; return how many.

    All of them are stopped before one is killed, by whole process groups, until no new one is found. So a process
    that forks faster than the search cannot escape.
    """
    frozen: set[int] = set()
    groups: set[int] = set()
    while new := {pid: row for pid, row in below(find()).items() if pid not in frozen and pid != os.getpid()}:
        for pid, row in new.items():
            _send(pid, signal.SIGSTOP)
            if row.group not in groups and _is_in_other_session(row.group):
                groups.add(row.group)
                _send(-row.group, signal.SIGSTOP)
        frozen |= new.keys()
    for pid in [*(-group for group in groups), *frozen]:
        _send(pid, signal.SIGKILL)
    _wait_gone(frozen)
    return len(frozen)


def _is_in_other_session(group: int) -> bool:
    """Return whether a process group belongs to another session than this process."""
    try:
        return group > 1 and os.getsid(group) != os.getsid(0)
    except ProcessLookupError:
        # Its leader has ended; the group still has the children of the leader.
        return group > 1 and group != os.getpgrp()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + GONE_WITHIN
    while left := pids & table().keys():
        if time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(left)))
            problem = f"these processes have not ended after SIGKILL: {names}"
            raise ClusterctlError(problem, "run the same command again")
        time.sleep(0.005)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Within the block, the first SIGINT, SIGTERM or SIGHUP acts as usual, and later ones are ignored.

    So the clean-up after the first one cannot be interrupted. A signal after the end of the work is delivered when the
    handlers of the caller are restored.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    received: list[int] = []
    late: list[int] = []
    done = False

    def once(number: int, frame: FrameType | None) -> None:
        (late if done else received).append(number)
        if done or len(received) > 1:
            return
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            raise SystemExit(128 + number)

    try:
        for number in numbers:
            signal.signal(number, once)
    except ValueError:
        # Only the main thread can handle signals.
        yield
        return
    try:
        yield
        done = True
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if late:
        os.kill(os.getpid(), late[0])
