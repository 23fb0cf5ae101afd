"""Refuse a run that conflicts with another one on this node, and let only one run start at a time.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os

from clusterctl.agent.processes import is_alive
from clusterctl.agent.records import read_json

# Importing typing takes 10 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Set, Tuple

# Kinds of devices that only one run may use at a time; those of a CPU are only numbers.
EXCLUSIVE = ("npu", "cuda")


@contextlib.contextmanager
def one_start_at_a_time(run_dir: str) -> Iterator[None]:
    """Hold a per-user lock, so that only one run at a time checks for conflicts and registers itself."""
    folder = os.path.dirname(os.path.dirname(run_dir))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, ".starting"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def living(run_dir: str) -> "Iterator[Tuple[str, Dict[str, Any]]]":
    """Yield the other runs with a living supervisor on this machine, each with its specification."""
    folder = os.path.dirname(os.path.dirname(run_dir))
    for path in glob.glob(os.path.join(glob.escape(folder), "*", "*", "attempts", "*", "supervisor.json")):
        attempt = os.path.dirname(path)
        if os.path.dirname(os.path.dirname(attempt)) == run_dir:
            continue
        supervisor, spec = read_json(path), read_json(os.path.join(attempt, "spec.json"))
        if supervisor is not None and spec is not None and is_alive(supervisor):
            yield str(spec.get("run_id")), spec


def conflicts(run_dir: str, spec: Dict[str, Any]) -> List[str]:
    """Return in words what this start would take from a run that lives here."""
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
