"""The record of a run, run.json: enough for another process to reach the run and to start it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clusterctl.errors import UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job, devices_on
from clusterctl.jobs.parts.notify import remember
from clusterctl.wire.typed_json import BadValue, decode, encode

# The format that this version writes. Files of version 0.1 carry no number and count as format 1.
FORMAT = 2


@dataclass(frozen=True)
class Abandoned:
    """A node that the run gave up, with the attempt that may still run there."""

    node: Node
    run_dir: str
    attempt: int


@dataclass(frozen=True)
class RunRecord:
    """A run as it was started: its job, its nodes, and the ranks and devices of each node in the present attempt."""

    run: str
    attempt: int
    job: Job
    cluster: Cluster
    run_dirs: dict[str, str] = field(hash=False)
    """The run's folder on each node."""
    ranks: dict[str, tuple[int, ...]] = field(hash=False)
    devices: dict[str, tuple[int, ...]] = field(hash=False)
    """The device of each rank, in the order of `ranks`."""
    created: float = 0.0
    """Seconds since the epoch."""
    code_paths: dict[str, str] = field(default_factory=dict, hash=False)
    """Where the pushed code lies on each node."""
    data_paths: dict[str, str] = field(default_factory=dict, hash=False)
    spares: tuple[Node, ...] = ()
    """Spare nodes, which can replace a lost node."""
    abandoned: tuple[Abandoned, ...] = ()
    """Nodes that were given up and have not answered since."""
    size: int = 0
    """How many nodes the run began with; 0 in records of early versions."""
    metrics_base: int = 0
    """Bytes of the local metrics.jsonl that came from nodes which ran rank 0 earlier."""
    format: int = 1
    saved_as: str = ""
    """The name of the run's folder on a shared disk or in a store; "" for `run`."""
    parts: tuple[str, ...] = ()
    """In a pod the names of all nodes of the job, each of which starts its own ranks; else empty."""

    @property
    def folder_name(self) -> str:
        """The name of the run's folder on a shared disk or in a store."""
        return self.saved_as or self.run

    @property
    def work_dirs(self) -> dict[str, str]:
        """By node, the folder in which the ranks of a program start; empty for a training."""
        found = {name: self.job.work_on(run_dir) for name, run_dir in self.run_dirs.items()}
        return {name: path for name, path in found.items() if path}

    @property
    def full_size(self) -> int:
        """Number of nodes at the start of the run, which it uses again as soon as enough nodes answer."""
        return self.size or len(self.cluster.nodes)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.ranks.values()))

    @property
    def is_newer(self) -> bool:
        """True if a newer version of clusterctl wrote the record: it can be read and stopped, but not restarted."""
        return self.format > FORMAT

    def require_known_format(self) -> None:
        """Raise a UsageError if this version must not start a further attempt of the run."""
        if self.is_newer:
            raise UsageError(
                f"{self.run}: a newer version of clusterctl started this run"
                f" (record format {self.format}, this version writes {FORMAT})",
                f"update clusterctl; `clusterctl stop {self.run}` works with this version too",
            )

    def node_of(self, rank: int) -> str | None:
        """Return the name of the node that runs a rank."""
        return next((name for name, ranks in self.ranks.items() if rank in ranks), None)

    def devices_on(self, node: str) -> tuple[int, ...]:
        """Return the devices of a node that the run uses; below a launcher, each has a worker."""
        return next((devices_on(self.job, each) for each in self.cluster.nodes if each.name == node), ())

    def device_of(self, node: str, rank: int) -> int | None:
        """Return the device of a rank on a node."""
        return dict(zip(self.ranks.get(node, ()), self.devices.get(node, ()), strict=False)).get(rank)


@dataclass(frozen=True)
class Placement:
    """The part of a record that says where a run's folders are. Reading it takes a tenth of the time of reading the
    record.
    """

    attempt: int
    run_dirs: dict[str, str] = field(hash=False)
    abandoned: tuple[Abandoned, ...] = ()


def placement_of(value: object, clusters: dict[str, Cluster]) -> tuple[Placement, Cluster]:
    """Return where the folders of a run are, and its cluster; raise BadValue where the record cannot be used.

    `clusters` holds those that were read before, by their JSON: most runs share a few.
    """
    if not isinstance(value, dict):
        raise BadValue("not a JSON object")
    text = json.dumps(value.get("cluster"))
    cluster = clusters.get(text)
    if cluster is None:
        cluster = clusters[text] = decode(Cluster, value.get("cluster"), "cluster")
    found = decode(Placement, value)
    if not cluster.nodes or not found.run_dirs.keys() >= set(cluster.names):
        raise BadValue("run_dirs does not name all nodes of the cluster")
    return found, cluster


def to_json(record: RunRecord) -> dict[str, object]:
    """Return the record as the JSON object of run.json."""
    # Node sets refer to the complete inventory, of which a run has only some nodes.
    job = replace(record.job, notify=remember(record.job.notify))
    bare = replace(record, job=job, cluster=replace(record.cluster, groups={}))
    result = encode(bare)
    assert isinstance(result, dict)
    return result


def from_json(value: Any) -> RunRecord:
    """Return the record in the JSON object of run.json; raise BadValue if it cannot be used."""
    if not isinstance(value, dict):
        raise BadValue("not a JSON object")
    written = value.get("format", 1)
    if isinstance(written, int) and written > FORMAT:
        value = _with_readable_job(value)
    record = decode(RunRecord, value)
    for name in record.cluster.names:
        if name not in record.run_dirs or len(record.ranks.get(name, ())) != len(
            record.devices.get(name, ())
        ):
            raise BadValue(f"run_dirs, ranks and devices do not agree about {name}")
    if not record.cluster.nodes or not record.ranks.keys() >= set(record.cluster.names):
        raise BadValue("ranks does not name all nodes of the cluster")
    return record


def _with_readable_job(value: Mapping[str, object]) -> dict[str, object]:
    """Replace a job that a newer version wrote in a way that this one cannot read; stopping a run needs none."""
    try:
        decode(Job, value.get("job"), "job")
    except BadValue:
        return {**value, "job": {"name": str(value.get("run"))}}
    return dict(value)
