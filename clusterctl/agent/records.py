"""Read and write the small JSON files in which a node records a run: atomically, and even if the disk is full.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import errno
import json
import os
import time
from typing import Any, Callable, Dict, Optional

from clusterctl.agent import compact_json
from clusterctl.agent.processes import read_limited

# How an attempt can end on a node.
FINAL = ("finished", "failed", "stopped")
# Limit of bytes of such a file: a specification of 16 ranks has about 100 kB.
LARGEST = 64 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
# Bytes: a disk with less is full, for logs that are written by the page.
LEAST = 1 << 16
# Seconds between two attempts to write the last records, and until that is given up.
AGAIN, PATIENCE = 0.5, 30.0


class AttemptFiles:
    """Name the files of one attempt of a run on a node."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.root = os.path.join(run_dir, "attempts", str(attempt))
        # Holds environments: only its owner may read it.
        self.spec = os.path.join(self.root, "spec.json")
        self.node = os.path.join(self.root, "node.json")
        self.supervisor = os.path.join(self.root, "supervisor.json")
        self.supervisor_log = os.path.join(self.root, "supervisor.log")
        # The monotonic time of the supervisor's last heartbeat.
        self.beat = os.path.join(self.root, "supervisor.beat")
        self.stop = os.path.join(self.root, "stop.json")
        self.pace = os.path.join(self.root, "pace.json")
        self.ranks = os.path.join(self.root, "ranks")
        self.logs = os.path.join(self.root, "logs")
        self.heartbeats = os.path.join(run_dir, "heartbeat")

    def rank(self, rank: int) -> str:
        return os.path.join(self.ranks, f"{rank}.json")

    def log(self, rank: int, stream: str) -> str:
        return os.path.join(self.logs, f"rank-{rank}.{stream}")


def marker_of(spec: Dict[str, Any]) -> Dict[str, str]:
    """Return the variables that every process of an attempt on a node has; two nodes may share one kernel."""
    return {
        "CLUSTERCTL_RUN_ID": str(spec["run_id"]),
        "CLUSTERCTL_ATTEMPT": str(spec["attempt"]),
        "CLUSTERCTL_NODE": str(spec["node"]),
    }


def write_json(path: str, value: Dict[str, Any], durable: bool = True) -> None:
    """Write a file aside and rename it, so that a reader sees all of it or the old one. Only its owner may read it.

    `durable` waits until it is on the disk. If the disk is full, an existing file is overwritten in place: it has a
    block already, and these files fit into one.
    """
    aside, text = f"{path}.{os.getpid()}.aside", compact_json.dumps(value).encode()
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as problem:
        _unlink(aside)
        if problem.errno not in FULL or not os.path.exists(path):
            raise
        _write_over(path, text)


def _unlink(path: str) -> None:
    """Remove a file if that is possible."""
    try:
        os.unlink(path)
    except OSError:
        return


def _write_over(path: str, text: bytes) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(text)
        file.truncate()


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object in a file; None if the file is missing, too large or damaged."""
    try:
        data = read_limited(path, LARGEST + 1)
        value = json.loads(data) if len(data) <= LARGEST else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def fullness(folder: str) -> Dict[str, str]:
    """Return the record about a full disk for a failed rank, which could not write the reason itself."""
    try:
        result = os.statvfs(folder)
    except OSError:
        return {}
    full = result.f_bavail * result.f_frsize < LEAST or (result.f_files and not result.f_favail)
    return {"full": folder} if full else {}


def remove_halves(run_dir: str) -> None:
    """Remove unfinished checkpoints, after the last process that could complete them has ended."""
    folder = os.path.join(run_dir, "checkpoints")
    halves = (
        [name for name in os.listdir(folder) if name.startswith(".tmp-")] if os.path.isdir(folder) else []
    )
    for name in halves:
        # Imported here, because it takes 1 MB that a supervisor rarely needs.
        import shutil

        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


class Records:
    """Writes a supervisor's records; those that do not fit on a full disk are kept and tried again."""

    def __init__(self) -> None:
        self.waiting: Dict[str, Dict[str, Any]] = {}

    def write(self, path: str, value: Dict[str, Any], durable: bool = True) -> None:
        """Write a record now, or as soon as the disk has space."""
        try:
            write_json(path, value, durable)
            self.waiting.pop(path, None)
        except OSError:
            self.waiting[path] = value

    def again(self) -> None:
        """Try to write the records that are waiting."""
        for path, value in list(self.waiting.items()):
            self.write(path, value)

    def finish(self, between: "Callable[[], object]" = lambda: None) -> None:
        """Try until all records are written, for at most PATIENCE seconds; call `between` before each attempt."""
        deadline = time.monotonic() + PATIENCE
        while self.waiting and time.monotonic() < deadline:
            between()
            time.sleep(AGAIN)
            self.again()


def write_beat(descriptor: int, now: float) -> None:
    """Record the time of a heartbeat in an open file; a full disk is detected elsewhere."""
    try:
        os.pwrite(descriptor, b"%020.3f\n" % now, 0)
    except OSError:
        return


def read_beat(path: str) -> Optional[float]:
    """Return the monotonic time of the last heartbeat; None if there was none."""
    try:
        with open(path, "rb") as file:
            return float(file.read(40))
    except (OSError, ValueError):
        return None


def blank_secrets(files: AttemptFiles, spec: Dict[str, Any]) -> None:
    """Remove the values of forwarded variables from the specification, once no process has to be started from it."""
    names = spec.get("secrets")
    if not isinstance(names, list) or not names:
        return
    ranks = [
        {
            **rank,
            "env": {name: "***" if name in names else text for name, text in (rank.get("env") or {}).items()},
        }
        for rank in spec["ranks"]
    ]
    try:
        write_json(files.spec, {**spec, "ranks": ranks, "secrets": []})
    except OSError:
        return
