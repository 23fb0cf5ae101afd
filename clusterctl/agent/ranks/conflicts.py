"""Refuse a run that conflicts with another one on this node, and let only one run start at a time.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from typing import Any, Dict, Iterator, List, Set, Tuple

from clusterctl.agent.processes import is_alive
from clusterctl.agent.records import read_json

# Kinds of devices that only one run may use at a time; those of a CPU are only numbers.
EXCLUSIVE = ("npu", "cuda")


def one_start_at_a_time(run_dir: str) -> FileIO:
    """Return a per-user lock, so that only one run at a time checks for conflicts and registers itself.

    The caller closes it.
    """
    folder = os.path.dirname(os.path.dirname(run_dir))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    lock = FileIO(os.path.join(folder, ".starting"), "a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def living(run_dir: str) -> "Iterator[Tuple[str, Dict[str, Any]]]":
    """Yield the other runs with a living supervisor on this machine, each with its specification."""
    folder = os.path.dirname(os.path.dirname(run_dir))
    runs = [run for name in _folders(folder) for run in _folders(name) if run != run_dir]
    for attempt in (entry for run in runs for entry in _folders(os.path.join(run, "attempts"))):
        supervisor = read_json(os.path.join(attempt, "supervisor.json"))
        spec = None if supervisor is None else read_json(os.path.join(attempt, "spec.json"))
        if supervisor is not None and spec is not None and is_alive(supervisor):
            yield str(spec.get("run_id")), spec


def _folders(path: str) -> List[str]:
    """Return the names in a folder, sorted, without hidden ones; empty if it is no folder."""
    try:
        return [os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.startswith(".")]
    except OSError:
        return []


def conflicts(run_dir: str, spec: Dict[str, Any]) -> List[str]:
    """Return in words the conflicts of this start with runs that are active on this node."""
    result = []
    for run, other in living(run_dir):
        both = sorted(_devices(spec) & _devices(other))
        if both and spec.get("kind") in EXCLUSIVE and not spec.get("share_devices"):
            result.append(f"device {', '.join(map(str, both))} is in use by {run}")
        port = spec.get("master_port")
        if port and port == other.get("master_port"):
            result.append(f"port {port} is the master port of {run}")
    return result


def _devices(spec: Dict[str, Any]) -> "Set[int]":
    devices = spec.get("devices")
    return {device for device in devices if isinstance(device, int)} if isinstance(devices, list) else set()
