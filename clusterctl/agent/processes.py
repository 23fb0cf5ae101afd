"""Identify processes by pid, start time and boot id, find them by a marker in their environment, and end them reliably.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

# Seconds between two scans of /proc, each up to 25 ms on a busy node.
WHOLE_LOOK = 0.25


# Bytes that are read of one file of /proc or /sys: /proc/net/tcp has 150 for each connection.
LARGEST_TEXT = 32 << 20
# Bytes of one piece.
PIECE = 1 << 16
# Seconds that ranks have for a last checkpoint.
GRACE = 30.0


def text_of(path: str) -> str:
    """Return the text of a small file, or an empty text if it cannot be read."""
    try:
        return read_limited(path, LARGEST_TEXT).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def read_limited(path: str, limit: int) -> bytes:
    """Return at most `limit` bytes of a file, read in pieces: a single read would reserve memory for all of them."""
    descriptor, data = os.open(path, os.O_RDONLY | os.O_CLOEXEC), bytearray()
    try:
        while len(data) < limit:
            piece = os.read(descriptor, min(PIECE, limit - len(data)))
            if not piece:
                break
            data += piece
    finally:
        os.close(descriptor)
    return bytes(data)


def boot_id() -> str:
    """Return the id of this boot of the machine: a pid of an earlier boot means nothing."""
    return text_of("/proc/sys/kernel/random/boot_id").strip()


def all_pids() -> List[int]:
    """Return the pids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def stat_of(pid: int) -> List[str]:
    """Return the fields of /proc/PID/stat from the state on: state, parent, group, ...; empty when the process is
    gone.
    """
    return text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()


def start_time(pid: int) -> Optional[int]:
    """When a process started, in clock ticks since boot; None when it is gone or only its exit status is
    left."""
    fields = stat_of(pid)
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return int(fields[19])


def state_letter(pid: int) -> str:
    """Return the state of a process as proc(5) has it: R, S, D, T, ...; an empty text when it is gone."""
    return "".join(stat_of(pid)[:1])


def identity(pid: int) -> Dict[str, object]:
    """Return what is recorded about a process that we started."""
    return {"pid": pid, "start_time": start_time(pid), "boot_id": boot_id()}


def is_alive(record: Mapping[str, object]) -> bool:
    """Return whether the recorded process still runs: its pid alone may belong to another process now."""
    pid, started = record.get("pid"), record.get("start_time")
    if not isinstance(pid, int) or started is None or record.get("boot_id") != boot_id():
        return False
    return start_time(pid) == started


def signal_recorded(record: Mapping[str, object], *numbers: int) -> bool:
    """Send signals to a recorded process; return False if it has ended.

    They go to its pidfd, so that another process which gets its pid meanwhile receives none.
    """
    pid = int(str(record.get("pid")))
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        # Python 3.8 and kernels before 5.3 have no pidfds; or the process has ended.
        descriptor = -1
    try:
        # After the descriptor was opened: whoever has the pid now also had it then.
        if not is_alive(record):
            return False
        for number in numbers:
            if descriptor < 0:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


# Bytes read of one process's environment; the kernel allows far less than this.
LARGEST_ENVIRON = 8 << 20


def environments() -> Iterator[Tuple[int, bytes]]:
    """Yield the pid and the environment of each other process that this login may read."""
    for pid in all_pids():
        try:
            environ = read_limited(f"/proc/{pid}/environ", LARGEST_ENVIRON)
        except OSError:
            # The process is gone, or another user's.
            continue
        if pid != os.getpid():
            yield pid, environ


def carries(marker: Mapping[str, str], environ: bytes) -> bool:
    """Return True if an environment has all of the marker's variables."""
    wanted = [f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in marker.items()]
    return all(variable in environ for variable in wanted) and set(wanted) <= set(environ.split(b"\0"))


def marked(marker: Mapping[str, str]) -> List[int]:
    """Return the pids of living processes that carry all of the marker's variables in their environment."""
    return [pid for pid, environ in environments() if carries(marker, environ)] if marker else []


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes; those that have ended are skipped."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def group_members(groups: Iterable[int]) -> Set[int]:
    """Return the living processes of some process groups."""
    wanted = set(groups)
    result = set()
    for pid in all_pids() if wanted else ():
        fields = stat_of(pid)
        if len(fields) > 2 and fields[0] not in "ZX" and int(fields[2]) in wanted:
            result.add(pid)
    return result


def end_all(
    groups: Iterable[int],
    marker: Mapping[str, str],
    grace: float,
    between: Callable[[], object] = lambda: None,
    limit: float = 5.0,
    more: Callable[[], Iterable[int]] = lambda: (),
    shorter: Callable[[], float] = lambda: float("inf"),
) -> Set[int]:
    """End process groups, the processes with a marker, and those that `more` returns: with SIGTERM, then with SIGKILL.

    Waits `grace` seconds between SIGTERM and SIGKILL; `shorter` may shorten them. A stopped process takes SIGTERM
    only after SIGCONT. `between` is called at each look. Returns the processes that are left after `limit` seconds of
    SIGKILL, which happens only if they hang in the kernel.
    """
    groups = list(groups)
    request: Set[int] = set()
    left: Set[int] = set()
    began = looked = time.monotonic()
    killed: Optional[float] = None
    while True:
        between()
        now = time.monotonic()
        waited, grace = now - began, min(grace, shorter())
        left = {pid for pid in left if start_time(pid) is not None}
        if not left or waited >= grace or now - looked >= WHOLE_LOOK:
            left, looked = group_members(groups) | set(marked(marker)) | set(more()), now
        # A machine that was suspended meanwhile has to send SIGKILL first.
        if not left or (killed is not None and now - killed >= limit):
            return left
        if waited >= grace:
            killed = now if killed is None else killed
            send(left, signal.SIGKILL)
        else:
            send(left - request, signal.SIGTERM)
            # At each look: one may be stopped in the middle of its last checkpoint.
            send(left, signal.SIGCONT)
            request |= left
        time.sleep(0.02 if waited < 1 or waited >= grace else 0.2)
