"""The processes of a sandbox: started with a record, found again by it, ended whole."""

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

# <sandbox id>/<node>, in the environment of all that runs on a node.
MARKER = "CLUSTERCTL_SANDBOX_NODE"
# Seconds a killed process may take: one in a full disk's write takes longest.
GONE_WITHIN = 10.0
LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class Started:
    """A process that was started here; pid and start time name it for good within one boot."""

    name: str
    pid: int
    start_time: str
    boot_id: str
    argv: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; another one with its pid does not count."""
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
    """Start a daemon that outlives this process; on return it is recorded and has become the command."""
    starter = [sys.executable, "-I", "-S", spawn.__file__, str(record), name]
    with log.open("ab") as out:
        done = subprocess.run(
            [*starter, *command],
            env=env,
            stdin=stdin,
            stdout=out,
            stderr=out,
            # Ctrl-C in the terminal is not meant for it.
            start_new_session=True,
            check=False,
        )
    if done.returncode:
        raise ClusterctlError(f"{name} could not be started: {tail(log)}")


def read_record(path: Path) -> Started | None:
    """The record of one process, or nothing where there is none."""
    try:
        value = json.loads(path.read_text())
        argv = tuple(value.pop("argv"))
        return Started(**value, argv=argv)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def read_records(folder: Path) -> list[Started]:
    """All that were ever recorded, alive or not."""
    return [record for path in sorted(folder.glob("*.json")) if (record := read_record(path))]


def tail(log: Path, lines: int = 3) -> str:
    """The last words of a log."""
    with contextlib.suppress(FileNotFoundError):
        return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:]) or "its log is empty"
    return "it left no log"


@dataclass(frozen=True)
class Seen:
    """One row of the process table."""

    parent: int
    group: int


def table() -> dict[int, Seen]:
    """All processes that still run, by pid; zombies have ended."""
    if LINUX:
        return dict(_linux_table())
    command = ["ps", "-axo", "pid=,ppid=,pgid=,stat="]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = (line.split() for line in shown.stdout.splitlines())
    return {int(row[0]): Seen(int(row[1]), int(row[2])) for row in rows if len(row) > 3 and row[3][0] != "Z"}


def _linux_table() -> Iterator[tuple[int, Seen]]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent, group = stat.rpartition(b")")[2].split()[:3]
        if state not in (b"Z", b"X"):
            yield int(name), Seen(int(parent), int(group))


def below(roots: set[int]) -> dict[int, Seen]:
    """These processes and all their descendants."""
    rows = table()
    found = roots & rows.keys()
    grown = True
    while grown:
        children = {pid for pid, row in rows.items() if row.parent in found}
        grown = not children <= found
        found |= children
    return {pid: rows[pid] for pid in found}


def marked(mark: str) -> set[int]:
    """The processes whose environment carries a mark: `<id>/<node>` of one node, `<id>/` of a sandbox."""
    wanted = f"{MARKER}={mark}".encode()

    def fits(entry: bytes) -> bool:
        return entry.startswith(wanted) if mark.endswith("/") else entry == wanted

    return {pid for pid in (table() if LINUX else ()) if any(map(fits, _environment(pid)))}


def named(name: str) -> set[int]:
    """The processes of this name; for looking, never for ending them."""
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
        # Gone, or another user's: neither is ours.
        return []


def end(find: Callable[[], set[int]]) -> int:
    """Kill what `find` names with all its descendants and wait until they are gone; says how many.

    All are stopped before one is killed, again and again until nothing new turns up, and whole process groups
    at a time: a process that forks and leaves faster than it is found can't slip away.
    """
    frozen: set[int] = set()
    groups: set[int] = set()
    while new := {pid: row for pid, row in below(find()).items() if pid not in frozen and pid != os.getpid()}:
        for pid, row in new.items():
            _send(pid, signal.SIGSTOP)
            if row.group not in groups and _apart(row.group):
                groups.add(row.group)
                _send(-row.group, signal.SIGSTOP)
        frozen |= new.keys()
    for pid in [*(-group for group in groups), *frozen]:
        _send(pid, signal.SIGKILL)
    _wait_gone(frozen)
    return len(frozen)


def _apart(group: int) -> bool:
    """Whether a process group is of a session that a daemon or a login made, not of the caller's own."""
    try:
        return group > 1 and os.getsid(group) != os.getsid(0)
    except ProcessLookupError:
        # Its leader has ended; the group lives on in the leader's children.
        return group > 1 and group != os.getpgrp()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + GONE_WITHIN
    while left := pids & table().keys():
        if time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(left)))
            what = f"processes that SIGKILL has not ended yet: {names}"
            raise ClusterctlError(what, "run the same command again")
        time.sleep(0.005)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Within, the first SIGINT, SIGTERM or SIGHUP does what it always does and later ones nothing.

    So the clean-up that the first one sets off can't itself be cut in half. One that comes when all is done
    waits until the caller's own handlers are back.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    came: list[int] = []
    late: list[int] = []
    done = False

    def once(number: int, frame: FrameType | None) -> None:
        (late if done else came).append(number)
        if done or len(came) > 1:
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
        # Not the main thread: signals are not ours to handle.
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
