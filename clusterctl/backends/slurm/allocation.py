"""Read the nodes of a Slurm allocation as an inventory, with names, addresses and devices from Slurm."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

from clusterctl.backends.slurm import programs
from clusterctl.errors import InputFaults, UsageError
from clusterctl.hostfile import detect, node_lists
from clusterctl.inventory.cluster import MAX_DEVICES, Cluster, Node

JOB = "SLURM_JOB_ID"
# The kind of device for the name of a gres.
KINDS = {"gpu": "cuda", "npu": "npu", "ascend": "npu", "ascend910": "npu", "ascend910b": "npu"}
PAIR = re.compile(r"(?:^|\s)([A-Za-z_/:]+)=(\S*)")
# One part of `GRES=gpu:a100:2(IDX:0,2-3)` or `GRES=npu(CNT:8)`; the type may be missing.
GRES = re.compile(
    r"(?P<name>[a-z][a-z0-9_]*)(?::[A-Za-z][A-Za-z0-9_.-]*)?(?::(?P<count>\d+))?"
    r"(?:\((?:IDX:(?P<ids>[0-9][0-9,-]*)|CNT:(?P<total>\d+))\))?(?=,|\s|\Z)"
)


def named(variables: Mapping[str, str], kind: str) -> Cluster:
    """Return the names of an allocation's nodes, without asking Slurm: enough to start their agents.

    The nodes are reached by srun. Without the id of a job there is only a list of names, which SSH must know.
    """
    entries, faults = node_lists.from_variables(variables)
    if faults:
        raise InputFaults(faults)
    plain = detect.from_entries(entries, "the Slurm allocation", kind)
    job = variables.get(JOB, "")
    if not job.isdecimal() or not programs.is_installed():
        return plain
    nodes = tuple(
        replace(
            node,
            host=node.name,
            allocation=f"slurm:{job}",
            # The disk of homes and programs is the same on all nodes of such clusters, so each node has its own folder.
            python=sys.executable,
            workdir=f"~/.clusterctl/nodes/{node.name}",
        )
        for node in plain.nodes
    )
    return replace(plain, name=f"slurm-{job}", nodes=nodes, source=f"the allocation of Slurm job {job}")


def described(cluster: Cluster) -> Cluster:
    """Return the nodes of an allocation with the addresses and devices that Slurm reports."""
    job = cluster.nodes[0].allocation.rpartition(":")[2]
    if not job:
        return cluster
    names = node_lists.fold(cluster.names)
    of_nodes, of_job = programs.run_together(
        ("scontrol", "show", "node", names, "--oneliner"), ("scontrol", "show", "job", job, "--details")
    )
    addresses = {facts["NodeName"]: facts.get("NodeAddr", "") for facts in records(of_nodes)}
    devices = dict(_devices(of_job))
    return replace(cluster, nodes=tuple(_described(node, addresses, devices) for node in cluster.nodes))


def _described(
    node: Node, addresses: Mapping[str, str], devices: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Node:
    address = addresses.get(node.name) or node.name
    kind, ids = devices.get(node.name, (node.kind, node.devices))
    return replace(node, address=address, server_id=address, kind=kind, devices=ids)


def records(text: str) -> Iterator[dict[str, str]]:
    """Yield the KEY=VALUE pairs of each line that `scontrol --oneliner` printed."""
    for line in text.splitlines():
        pairs = dict(PAIR.findall(line))
        if pairs:
            yield pairs


def _devices(text: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield node, kind and device ids of each node with devices, from the details of a job."""
    for pairs in records(text):
        names, gres = pairs.get("Nodes", ""), pairs.get("GRES", "")
        for found in GRES.finditer(gres):
            kind = KINDS.get(found["name"].lower())
            if kind is None:
                continue
            ids = _ids(found["ids"], int(found["count"] or found["total"] or 0))
            if len(ids) > MAX_DEVICES:
                raise UsageError(f"{names}: {len(ids)} devices of {found['name']}", f"at most {MAX_DEVICES}")
            for name in node_lists.expand(names):
                yield name, (kind, ids)
            break


def _ids(text: str | None, count: int) -> tuple[int, ...]:
    """Return the ids of devices in `0,2-3`; without a text, the first ones.

    If Slurm hides the other devices from a job, the visible ones count from 0.
    """
    if text is None:
        return tuple(range(count))
    ids = tuple(
        number
        for part in text.split(",")
        for first, _, last in [part.partition("-")]
        for number in range(int(first), int(last or first) + 1)
    )
    count = len(ids)
    return tuple(range(count)) if ids != tuple(range(count)) and programs.hides_devices() else ids
