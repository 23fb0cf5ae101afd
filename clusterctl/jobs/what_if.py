"""Plan a job on nodes that do not exist: `--what-if nodes=8,devices=8,kind=npu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.document import load_document
from clusterctl.errors import Collected, UsageError, did_you_mean
from clusterctl.inventory.cluster import KINDS, Cluster, Node

SOURCE = "--what-if"
KEYS = ("nodes", "devices", "kind")
# Limit of the nodes, and of the devices of one node.
MOST = 100_000
EXAMPLE = "as in --what-if nodes=8, or nodes=192,devices=8,kind=npu without an inventory"


@dataclass(frozen=True)
class WhatIf:
    """A number of equal nodes; missing values are those of the first node of the inventory."""

    nodes: int
    devices: int | None = None
    kind: str | None = None

    def cluster(self, inventory: Callable[[], Cluster]) -> Cluster:
        """Return the nodes; the inventory is read only if `devices` or `kind` is missing."""
        complete = self.devices is not None and self.kind is not None
        like = Node("node1", "node1", "node1") if complete else inventory().nodes[0]
        devices = like.devices if self.devices is None else tuple(range(self.devices))
        alike = replace(like, devices=devices, kind=self.kind or like.kind, device_ips=(), super_pod="")
        names = [f"what-if{number}" for number in range(1, self.nodes + 1)]
        nodes = [replace(alike, name=name, host=name, address=name, server_id=name) for name in names]
        return Cluster("what-if", tuple(nodes), source=SOURCE)


def read(text: str) -> WhatIf:
    """Return the WhatIf in a text such as `nodes=8,kind=npu`; raise all errors of the text."""
    if not text.strip():
        raise UsageError("--what-if is empty", EXAMPLE)
    given: dict[str, str] = {}
    errors = Collected()
    for part in text.split(","):
        with errors:
            key, equals, value = part.strip().partition("=")
            if key in given:
                raise UsageError(f"--what-if {text}: {key} is given twice", "keep one of them")
            if key not in KEYS or not equals:
                problem = f"{part!r} is not nodes=, devices= or kind="
                raise UsageError(f"--what-if {text}: {problem}", did_you_mean(key, KEYS) or EXAMPLE)
            given[key] = value
            _check(text, key, value)
    if "nodes" not in given:
        with errors:
            raise UsageError(f"--what-if {text}: the number of nodes is missing", EXAMPLE)
    errors.raise_all()
    devices = int(given["devices"]) if "devices" in given else None
    return WhatIf(int(given["nodes"]), devices, given.get("kind"))


def without_folders(job: Path) -> list[str]:
    """Return overrides that remove missing folders from a job file, since its nodes do not exist either."""
    if job.suffix not in (".yaml", ".yml", ".json") or not job.is_file():
        return []
    value = load_document(job).value
    named = {key: value.get(key) for key in ("data", "code")} if isinstance(value, dict) else {}
    return [
        f"{key}=null"
        for key, folder in named.items()
        if isinstance(folder, str) and not (job.parent / Path(folder).expanduser()).is_dir()
    ]


def _check(text: str, key: str, value: str) -> None:
    """Raise a UsageError if a value is wrong."""
    if key == "kind":
        if value not in KINDS:
            near = did_you_mean(value, KINDS) or f"use one of {', '.join(KINDS)}"
            raise UsageError(f"--what-if {text}: unknown kind {value!r}", near)
    elif not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= MOST and len(value) < 9):
        raise UsageError(f"--what-if {text}: {key}={value} is not a number of {key}", f"1 to {MOST}")
