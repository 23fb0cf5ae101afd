"""Write nodes in the format of another launcher; report values that the format cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.hostfile import detect, formats, node_lists
from clusterctl.hostfile.detect import Source
from clusterctl.hostfile.filter import Slots, chosen
from clusterctl.hostfile.formats import Entry
from clusterctl.hostfile.init import cluster_text as cluster_text
from clusterctl.hostfile.node_lists import NODE_LISTS, TARGETS
from clusterctl.inventory.cluster import MAX_DEVICES, Cluster, Node

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
# The default port of torchrun.
MASTER_PORT = 29500


@dataclass(frozen=True)
class Loss(Fault):
    """One value that a format cannot hold."""

    droppable: bool = True
    """False if the value cannot be left out: the result would name another node, or none."""
    reach: bool = False
    """True for a value that only the login needs and that can be in ~/.ssh/config instead."""


@dataclass(frozen=True)
class TorchrunNode:
    """The command to type on one node."""

    node: str
    node_rank: int
    nproc_per_node: int
    command: str


def narrowed(source: Source, include: str | None, exclude: str | None) -> Source:
    """Return the source with the slots that DeepSpeed's filters select; a slot is a device number."""
    if include is None and exclude is None:
        return source
    devices = {key: _devices(entry) for key, entry in zip(source.keys, source.entries, strict=True)}
    left = chosen(devices, include, exclude)
    pairs = [(key, entry) for key, entry in zip(source.keys, source.entries, strict=True) if key in left]
    entries = tuple(_with_devices(entry, left[key]) for key, entry in pairs)
    cluster = source.cluster and _left_of(source.cluster, left)
    return replace(source, entries=entries, cluster=cluster)


def narrowed_cluster(cluster: Cluster, include: str) -> Cluster:
    """Return the devices of an inventory in DeepSpeed's `--include`."""
    return _left_of(cluster, chosen({node.name: node.devices for node in cluster.nodes}, include, None))


def _left_of(cluster: Cluster, left: Slots) -> Cluster:
    nodes = tuple(_node_with(node, left[node.name]) for node in cluster.nodes if node.name in left)
    return replace(cluster, nodes=nodes, groups={})


def _devices(entry: Entry) -> tuple[int, ...]:
    return entry.devices if entry.devices is not None else tuple(range(entry.slots or 1))


def slots_left(source: Source) -> list[str]:
    """Return the slots of each node after a filter, as `w1: 0,2`."""
    return [f"{entry.address}: {','.join(map(str, _devices(entry)))}" for entry in source.entries]


def _with_devices(entry: Entry, devices: tuple[int, ...]) -> Entry:
    if devices == _devices(entry):
        return entry
    first = devices == tuple(range(len(devices)))
    return replace(entry, slots=len(devices), devices=None if first else devices)


def _node_with(node: Node, devices: tuple[int, ...]) -> Node:
    known = dict(zip(node.devices, node.device_ips, strict=False))
    ips = tuple(known[device] for device in devices) if node.device_ips else ()
    return replace(node, devices=devices, device_ips=ips)


def of_cluster(cluster: Cluster, slots: int | None = None) -> Source:
    """Return the nodes of an inventory, each with its first `slots` devices if a number is given."""
    if slots is not None:
        cluster = replace(cluster, nodes=tuple(_first(node, slots) for node in cluster.nodes))
    entries = tuple(detect.entries_of(cluster))
    return Source(cluster.source, "cluster", entries, cluster=cluster)


def _first(node: Node, slots: int) -> Node:
    # With more ranks than devices, the launcher decides which ranks share one.
    if slots > len(node.devices):
        return replace(node, devices=tuple(range(slots)), device_ips=())
    return _node_with(node, node.devices[:slots])


def with_slots(source: Source, slots: int | None) -> Source:
    """Return the source with a number of slots for nodes without one."""
    if slots is None or source.cluster is not None:
        return source
    entries = tuple(
        entry if entry.slots is not None else replace(entry, slots=slots) for entry in source.entries
    )
    return replace(source, entries=entries)


def require_format(target: str) -> None:
    """Raise a UsageError if `target` is no format of a hostfile."""
    if target not in TARGETS:
        near = did_you_mean(target, TARGETS)
        raise UsageError(f"unknown format {target!r}", near or f"use one of {', '.join(TARGETS)}")


def losses(source: Source, target: str) -> list[Loss]:
    """Return a Loss for each value that the format cannot hold and that ranks or logins depend on."""
    require_format(target)
    keys = source.keys
    found = [loss for number, key in enumerate(keys) for loss in _entry_losses(source, number, key, target)]
    if source.scattered:
        problem = "its ranks do not follow the nodes, and no other format can place ranks"
        found.append(Loss(source.path, problem, "keep the rank table"))
    return found


def _entry_losses(source: Source, number: int, key: str, target: str) -> Iterator[Loss]:
    line = source.entries[number].line
    where = f"{source.path}:{line}" if line else f"{source.path} {key}"
    for feature, remedy in _reach_lost(source, number, target):
        yield Loss(where, f"{target} can't hold {feature}", remedy, reach=True)
    for feature, remedy, droppable in _lost(source, number, target):
        yield Loss(where, f"{target} can't hold {feature}", remedy, droppable)


def _reach_lost(source: Source, number: int, target: str) -> Iterator[tuple[str, str]]:
    entry = source.entries[number]
    if entry.user and target in ("deepspeed", NODE_LISTS):
        yield f"the user {entry.user}", "write it to ~/.ssh/config"
    if source.cluster is None or target in ("cluster", "torchrun"):
        return
    node = source.cluster.nodes[number]
    if node.port != 22:
        yield f"the port {node.port}", "write it to ~/.ssh/config"
    if node.gateway:
        yield f"the gateway {node.gateway}", "write it as ProxyJump to ~/.ssh/config"


def _lost(source: Source, number: int, target: str) -> Iterator[tuple[str, str, bool]]:
    entry = source.entries[number]
    if entry.max_slots is not None and target != "openmpi":
        yield f"max_slots={entry.max_slots}", "only OpenMPI has such a limit", True
    if entry.devices is not None and target != "cluster" and not _chooses(source, number, target):
        yield f"which devices: {','.join(map(str, entry.devices))}", "it uses the first ones", True
    if source.cluster is not None and target == "cluster" and (entry.slots or 0) > MAX_DEVICES:
        yield f"{entry.slots} ranks of one node", f"a node has at most {MAX_DEVICES} devices", False
    if ":" in entry.address and target in ("mpich", NODE_LISTS):
        yield (
            f"the address {entry.address}",
            "it would split the address at the colons; give the node a name",
            False,
        )
    unsaid = target in ("deepspeed", "torchrun") or (target == "mpich" and source.dialect == "openmpi")
    if entry.slots is None and unsaid:
        yield "a node without a number of slots", "set one with --slots N", False


def left_out(source: Source, target: str) -> list[str]:
    """Return the names of the other values that the format cannot hold; ranks and logins do not depend on them."""
    if source.cluster is None or target == "cluster":
        return []
    names = ["node names"] if any(node.name != node.address for node in source.cluster.nodes) else []
    usual = Node("", "", "")
    keys = ("key", "python", "workdir", "device_ips", "interface", "env")
    return names + [
        name.replace("_", " ")
        for name in keys
        if any(getattr(node, name) != getattr(usual, name) for node in source.cluster.nodes)
    ]


def _chooses(source: Source, number: int, target: str) -> bool:
    """Return whether a torchrun command can choose these devices, which needs their kind."""
    return (
        target == "torchrun" and source.cluster is not None and source.cluster.nodes[number].kind in VISIBLE
    )


def render(
    source: Source,
    target: str,
    *,
    lossy: bool = False,
    kind: str = "cpu",
    reached: bool = False,
    port: int = MASTER_PORT,
) -> str:
    """Return the nodes in another format; raise InputFaults if something would be lost, unless `lossy`.

    `reached`: values that only the login needs may be lost, because the inventory that has them is kept.
    """
    _refuse([loss for loss in losses(source, target) if not (reached and loss.reach)], lossy)
    if target == "cluster":
        return cluster_text(detect.cluster_of(source, kind))
    if target == NODE_LISTS:
        text = node_lists.render(source.entries)
        faults = node_lists.inspect_text(text, "the list")[1]
        if faults:
            raise InputFaults(faults)
        return text
    if target == "torchrun":
        return "".join(f"{row.command}\n" for row in torchrun(source, lossy=lossy, port=port))
    return formats.render_entries(source.entries, target)


def _refuse(losses: Sequence[Loss], lossy: bool) -> None:
    if any(not loss.droppable for loss in losses):
        raise InputFaults(losses)
    if losses and not lossy:
        raise InputFaults(losses, "--lossy leaves it out")


def torchrun(source: Source, *, lossy: bool = False, port: int = MASTER_PORT) -> list[TorchrunNode]:
    """Return the torchrun command of each node; the first node is the master."""
    _refuse(losses(source, "torchrun"), lossy)
    rows = []
    for number, entry in enumerate(source.entries):
        argv = [
            "torchrun",
            f"--nnodes={len(source.entries)}",
            f"--nproc-per-node={entry.slots or 1}",
            f"--node-rank={number}",
            f"--master-addr={source.entries[0].address}",
            f"--master-port={port}",
            "train.py",
        ]
        visible = _visible(source, number)
        rows.append(TorchrunNode(entry.address, number, entry.slots or 1, " ".join(visible + argv)))
    return rows


def _visible(source: Source, number: int) -> list[str]:
    devices = source.entries[number].devices
    if devices is None or source.cluster is None or source.cluster.nodes[number].kind not in VISIBLE:
        return []
    return [f"{VISIBLE[source.cluster.nodes[number].kind]}={','.join(map(str, devices))}"]
