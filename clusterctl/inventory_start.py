"""The Cluster that `clusterctl init` writes down: from a node set, or from any file that names nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import replace

from clusterctl import hostfile_any, inventory, nodeset
from clusterctl.addresses import address_fault
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.hostfile_any import Source
from clusterctl.inventory import Cluster, Node

USUAL_DEVICES = 8  # of a node of which nothing is said: most boards with NPUs have so many
USUAL_KIND = "npu"


def from_hosts(hosts: str | None, devices: str | None, kind: str | None, name: str) -> Cluster:
    """The nodes of a set, all alike; two to be overwritten where none is named."""
    names = nodeset.expand(hosts) if hosts is not None else ["10.0.0.1", "10.0.0.2"]
    ids, faults = _asked(devices, kind)
    faults += _host_faults(names)
    if faults:
        raise InputFaults(faults)
    nodes = [
        Node(one, one, one, devices=_usual(ids), kind=kind or USUAL_KIND, server_id=one) for one in names
    ]
    return _named(Cluster(name, tuple(nodes)))


def from_file(source: Source, devices: str | None, kind: str | None, name: str) -> Cluster:
    """The nodes of a file; `devices` where it does not say how many, `kind` where it does not say which."""
    ids, faults = _asked(devices, kind)
    faults += [*source.faults, *_too_many(source.path, len(source.entries))]
    if source.cluster is not None and kind:
        faults.append(Fault("--kind", f"{source.path} says the kind itself", "leave it out"))
    if devices and not faults and not unsaid(source):
        faults.append(
            Fault("--devices", f"{source.path} says them for every node", "leave it out, or edit the result")
        )
    if faults:
        raise InputFaults(faults)
    if source.cluster is not None:
        return _named(replace(source.cluster, name=name))
    entries = [
        one if one.slots is not None else replace(one, slots=len(_usual(ids)), devices=_usual(ids))
        for one in source.entries
    ]
    cluster = hostfile_any.from_entries(entries, source.path, kind or USUAL_KIND)
    return _named(replace(cluster, name=name))


def unsaid(source: Source) -> list[str]:
    """The nodes of whose devices the file says nothing."""
    return [entry.address for entry in source.entries if entry.slots is None]


def _usual(ids: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(range(USUAL_DEVICES)) if ids is None else ids


def _asked(devices: str | None, kind: str | None) -> tuple[tuple[int, ...] | None, list[Fault]]:
    """The devices that an option names, and what is wrong with it and with the kind."""
    faults = []
    if kind is not None and kind not in inventory.KINDS:
        faults.append(Fault("--kind", f"unknown kind {kind!r}", "cpu, cuda (NVIDIA GPUs) or npu (Ascend)"))
    try:
        number = devices is not None and devices.isascii() and devices.isdigit()
        value = int(devices[:5]) if devices is not None and number else devices
        return (None if value is None else inventory.parse_devices(value)), faults
    except UsageError as error:
        return None, [*faults, Fault("--devices", error.message, error.hint)]


def _host_faults(names: Sequence[str]) -> Iterator[Fault]:
    if not names:
        yield Fault("--hosts", "names no node", "as in node[1-4]")
    yield from _too_many("--hosts", len(names))
    for name in names[: inventory.MAX_NODES]:
        if not inventory.HOST.match(name):
            remedy = "letters, digits, '.', '-', '_' and ':' only"
            yield Fault("--hosts", f"{name[:80]!r} is no name or address that SSH could reach", remedy)
        elif fault := address_fault(name):
            yield Fault("--hosts", fault, "as in 10.0.0.1 or fd00::1, or a name")


def _too_many(where: str, count: int) -> Iterator[Fault]:
    if count > inventory.MAX_NODES:
        what = f"{count:,} nodes, and an inventory has at most {inventory.MAX_NODES:,}"
        yield Fault(where, what, "take some of them")


def _named(cluster: Cluster) -> Cluster:
    """Nodes that were named by their addresses get names: node1, node2, as they stand."""
    if cluster.groups:
        return cluster
    taken = set(cluster.names)
    free = (name for number in range(1, len(taken) * 2 + 1) if (name := f"node{number}") not in taken)
    return replace(
        cluster,
        nodes=tuple(replace(one, name=next(free)) if _is_address(one.name) else one for one in cluster.nodes),
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
