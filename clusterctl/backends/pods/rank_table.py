"""Find the rank table that a platform mounts into a container, wait until it is complete, and check it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.ranktable.check import load
from clusterctl.ranktable.table import RankTable

# The path at which ascend-operator mounts the table, which must not be changed.
OPERATOR = "/user/serverid/devindex/config/hccl.json"
# The path of the table on ModelArts.
KNOWN = (OPERATOR, "/user/config/jobstart_hccl.json", "/home/ma-user/rank_table/jobstart_hccl.json")
# A ConfigMap reaches a pod up to a minute late, and the operator waits for the devices of all pods.
PATIENCE = 600.0
POLL = 1.0
COMPLETED = "completed"


def find(variables: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """Return the table that the platform announces; it may not exist yet. None if there is none."""
    named = variables.get("RANK_TABLE_FILE", "")
    if named:
        return root / named.lstrip("/")
    paths = [root / known.lstrip("/") for known in KNOWN]
    present = [path for path in paths if path.exists()]
    mounted = [path for path in paths if path.parent.is_dir()]
    return next(iter([*present, *mounted]), None)


def wait(path: Path, tell: Callable[[str, str], None], patience: float = PATIENCE) -> RankTable:
    """Return the table once it is complete; raise an error that names what was missing when the time is over."""
    deadline = time.monotonic() + patience
    reason = ""
    while True:
        before, reason = reason, why_incomplete(path)
        if not reason:
            break
        if reason != before:
            tell("ranktable", f"waiting: {reason}")
        if time.monotonic() > deadline:
            hint = (
                "the operator writes it once all pods have their devices: "
                "kubectl describe shows pods that wait, and the operator's log says why"
            )
            raise WorkFailed(f"no complete rank table after {patience:g} s: {reason}", hint)
        time.sleep(POLL)
    table = load(path)
    tell("ranktable", f"{path}: {len(table.servers)} servers, {table.ranks} ranks, checked")
    return table


def why_incomplete(path: Path) -> str:
    """Return why a table is not complete yet; "" if it is, or if waiting cannot help."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"{path} does not exist yet"
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: {problem}", "the platform's rank table must be readable") from None
    if not text.strip():
        return f"{path} is empty"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        # A writer may be in the middle of it; the check reports what stays wrong.
        return "" if text.rstrip().endswith("}") else f"{path} ends in the middle"
    status = value.get("status", COMPLETED) if isinstance(value, dict) else COMPLETED
    return "" if status == COMPLETED else f'the status in {path} is "{status}", not "{COMPLETED}"'
