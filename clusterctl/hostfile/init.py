"""Build the Cluster that `clusterctl init` writes: from a node set, or from any file that lists nodes.

Write a Cluster as the text of a cluster.yaml: in a short form, or with comments for people who edit it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.hostfile import detect
from clusterctl.hostfile.detect import Source
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory import nodeset
from clusterctl.inventory.addresses import address_fault, is_ip
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.text import escape_controls

# Devices of a node without a count: most NPU nodes have 8.
USUAL_DEVICES = 8
USUAL_KIND = "npu"


def from_hosts(hosts: str | None, devices: str | None, kind: str | None, name: str) -> Cluster:
    """Return the nodes of a node set, all with the same devices; two example nodes if no set is given."""
    names = nodeset.expand(hosts) if hosts is not None else ["10.0.0.1", "10.0.0.2"]
    ids, faults = _parse_options(devices, kind)
    faults += _host_faults(names)
    if faults:
        raise InputFaults(faults)
    nodes = [
        Node(name, name, name, devices=_usual(ids), kind=kind or USUAL_KIND, server_id=name) for name in names
    ]
    return _named(Cluster(name, tuple(nodes)))


def from_file(source: Source, devices: str | None, kind: str | None, name: str) -> Cluster:
    """Return the nodes in a file; `devices` and `kind` apply to nodes for which the file has none."""
    ids, faults = _parse_options(devices, kind)
    faults += [*source.faults, *_too_many(source.path, len(source.entries))]
    if source.cluster is not None and kind:
        faults.append(Fault("--kind", f"{source.path} has the kind of the devices", "leave it out"))
    if devices and not faults and not unsaid(source):
        faults.append(
            Fault(
                "--devices",
                f"{source.path} has the devices of every node",
                "leave it out, or edit the result",
            )
        )
    if faults:
        raise InputFaults(faults)
    if source.cluster is not None:
        return _named(replace(source.cluster, name=name))
    entries = [
        entry if entry.slots is not None else replace(entry, slots=len(_usual(ids)), devices=_usual(ids))
        for entry in source.entries
    ]
    cluster = detect.from_entries(entries, source.path, kind or USUAL_KIND)
    return _named(replace(cluster, name=name))


def unsaid(source: Source) -> list[str]:
    """Return the nodes for which the file has no devices."""
    return [entry.address for entry in source.entries if entry.slots is None]


def _usual(ids: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(range(USUAL_DEVICES)) if ids is None else ids


def _parse_options(devices: str | None, kind: str | None) -> tuple[tuple[int, ...] | None, list[Fault]]:
    """Return the devices that --devices names, and the faults of --devices and --kind."""
    faults = []
    if kind is not None and kind not in inventory_cluster.KINDS:
        faults.append(Fault("--kind", f"unknown kind {kind!r}", "cpu, cuda (NVIDIA GPUs) or npu (Ascend)"))
    try:
        number = devices is not None and devices.isascii() and devices.isdigit()
        value = int(devices[:5]) if devices is not None and number else devices
        return (None if value is None else inventory_cluster.parse_devices(value)), faults
    except UsageError as error:
        return None, [*faults, Fault("--devices", error.message, error.hint)]


def _host_faults(names: Sequence[str]) -> Iterator[Fault]:
    if not names:
        yield Fault("--hosts", "lists no nodes", "as in node[1-4]")
    yield from _too_many("--hosts", len(names))
    for name in names[: inventory_cluster.MAX_NODES]:
        if not inventory_cluster.HOST.match(name):
            remedy = "letters, digits, '.', '-', '_' and ':' only"
            yield Fault("--hosts", f"{name[:80]!r} is not a name or address that SSH can reach", remedy)
        elif fault := address_fault(name):
            yield Fault("--hosts", fault, "as in 10.0.0.1 or fd00::1, or a name")


def _too_many(where: str, count: int) -> Iterator[Fault]:
    if count > inventory_cluster.MAX_NODES:
        problem = f"{count:,} nodes; an inventory has at most {inventory_cluster.MAX_NODES:,}"
        yield Fault(where, problem, "choose fewer nodes")


def _named(cluster: Cluster) -> Cluster:
    """Return the cluster with nodes that are named by their addresses renamed to node1, node2 and so on."""
    if cluster.groups:
        return cluster
    taken = set(cluster.names)
    free = (name for number in range(1, len(taken) * 2 + 1) if (name := f"node{number}") not in taken)
    return replace(
        cluster,
        nodes=tuple(replace(node, name=next(free)) if is_ip(node.name) else node for node in cluster.nodes),
    )


_PLAIN = re.compile(r"[A-Za-z~/][A-Za-z0-9._/~-]*\Z|[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+\Z")
_COMMENTED = """\
# The machines that clusterctl reaches{origin}. Check it with: clusterctl nodes, then clusterctl doctor
name: {name}

defaults:                         # for every node that does not say otherwise
  # user: alice                   # default: as SSH chooses
  # key: ~/.ssh/id_ed25519
  # port: 22
  # python: ~/venv/bin/python     # the Python of the ranks on the node
  # workdir: ~/.clusterctl        # folder on the node for code, data and runs
  {devices:<32}# a count, a half-open range "[0,8)", or a list [0, 1]
  {kind:<32}# cpu, cuda or npu
  # interface: eth0               # network between the nodes; set for gloo, NCCL and HCCL
  # setup: /usr/local/Ascend/ascend-toolkit/set_env.sh   # sourced once on each node before ranks start

nodes:                            # `host` is for SSH, `address` for the ranks and rank tables; with an alias of SSH
  # node1: {{host: my-alias, address: 10.0.0.1}}   # as `host`, `address` must be the IP address
{nodes}
"""
_GROUPS = """\

# groups:
#   left: {first:<24}# then: clusterctl exec @left -- hostname
"""


def cluster_text(cluster: Cluster) -> str:
    """Return a cluster.yaml that has exactly these nodes."""
    lines = [f"name: {_yaml(cluster.name)}", "nodes:", *_node_lines(cluster)]
    return "\n".join(lines + _shared_lines(cluster)) + "\n"


def commented(cluster: Cluster, origin: str = "") -> str:
    """Return a commented cluster.yaml of these nodes; `defaults` has the values that most of them share."""
    devices = Counter(node.devices for node in cluster.nodes).most_common(1)[0][0]
    kind = Counter(node.kind for node in cluster.nodes).most_common(1)[0][0]
    text = _COMMENTED.format(
        origin=f", from {escape_controls(origin)}" if origin else "",
        name=_yaml(cluster.name),
        devices=f"devices: {_flow(_device_value(devices))} ",
        kind=f"kind: {kind} ",
        nodes="\n".join(_node_lines(cluster, _Defaults(devices, kind))),
    )
    shared = "".join(f"{line}\n" for line in _shared_lines(cluster))
    return (
        text
        + shared
        + ("" if cluster.groups else _GROUPS.format(first=f"{nodeset.fold(cluster.names[:2])} "))
    )


@dataclass(frozen=True)
class _Defaults:
    """The `defaults` of a file, which its nodes leave out."""

    devices: tuple[int, ...]
    kind: str


def _node_lines(cluster: Cluster, defaults: _Defaults | None = None) -> list[str]:
    return [f"  {_yaml(node.name)}: {_flow(_own_keys(node, defaults))}" for node in cluster.nodes]


def _shared_lines(cluster: Cluster) -> list[str]:
    lines = ["groups:"] if cluster.groups else []
    lines += [f"  {_yaml(name)}: {_yaml(','.join(names))}" for name, names in cluster.groups.items()]
    return lines + ([f"known_hosts: {_yaml(cluster.known_hosts)}"] if cluster.known_hosts else [])


def _own_keys(node: Node, defaults: _Defaults | None) -> dict[str, object]:
    """Return the keys that a node needs; the rest follows from its name and the defaults."""
    usual = Node(node.name, node.name, node.host, server_id=node.address)
    needed = {
        item.name: getattr(node, item.name)
        for item in fields(Node)
        if getattr(node, item.name) != getattr(usual, item.name)
        and item.name not in ("devices", "kind", "unnamed")
    }
    if node.kind != (defaults.kind if defaults else "cpu"):
        needed["kind"] = node.kind
    # A node without devices in the file would be asked.
    if not node.is_asked and (defaults is None or node.devices != defaults.devices):
        needed["devices"] = _device_value(node.devices)
    return needed


def _device_value(devices: tuple[int, ...]) -> int | list[int]:
    """Return a count if the devices are the first ones, else their list."""
    return len(devices) if devices == tuple(range(len(devices))) else list(devices)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _yaml(value) if isinstance(value, str) else str(value)


def _yaml(text: str) -> str:
    plain = _PLAIN.match(text) and text.lower() not in (
        "null",
        "true",
        "false",
        "~",
        "yes",
        "no",
        "on",
        "off",
    )
    return text if plain else json.dumps(text)
