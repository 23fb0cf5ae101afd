"""Two runs on one node: what the other runs that live here hold, and one start at a time.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
from typing import Any, Dict, Iterator, List, Tuple

from clusterctl.agent.processes import is_alive

# Kinds of devices that one run has for itself; a CPU's are only numbers.
EXCLUSIVE = ("npu", "cuda")


@contextlib.contextmanager
def one_start_at_a_time(run_dir: str) -> Iterator[None]:
    """Between the look at the others and one's own entry no other start of this user looks."""
    folder = os.path.dirname(os.path.dirname(run_dir))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, ".starting"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def living(run_dir: str) -> "Iterator[Tuple[str, Dict[str, Any]]]":
    """The other runs that have a living supervisor on this machine, each with what it was started from."""
    folder = os.path.dirname(os.path.dirname(run_dir))
    for path in glob.glob(os.path.join(glob.escape(folder), "*", "*", "attempts", "*", "supervisor.json")):
        attempt = os.path.dirname(path)
        if os.path.dirname(os.path.dirname(attempt)) == run_dir:
            continue
        try:
            with open(path, encoding="utf-8") as file:
                supervisor = json.load(file)
            with open(os.path.join(attempt, "spec.json"), encoding="utf-8") as file:
                spec = json.load(file)
        except (OSError, ValueError):
            continue
        if isinstance(supervisor, dict) and isinstance(spec, dict) and is_alive(supervisor):
            yield str(spec.get("run_id")), spec


def conflicts(run_dir: str, spec: Dict[str, Any]) -> List[str]:
    """What this start would take from a run that lives here, in words."""
    found = []
    for run, other in living(run_dir):
        both = sorted(set(spec.get("devices") or ()) & set(other.get("devices") or ()))
        if both and spec.get("kind") in EXCLUSIVE and not spec.get("share_devices"):
            found.append(f"device {', '.join(map(str, both))} is in use by {run}")
        port = spec.get("master_port")
        if port and port == other.get("master_port"):
            found.append(f"port {port} is the master port of {run}")
    return found
