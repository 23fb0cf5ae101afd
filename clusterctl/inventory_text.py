"""A Cluster as the text of a cluster.yaml: short, to be read back, or with the comments that a person begins with."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from typing import Any

from clusterctl import nodeset
from clusterctl.inventory import Cluster, Node
from clusterctl.sanitize import escape_controls

_PLAIN = re.compile(r"[A-Za-z~/][A-Za-z0-9._/~-]*\Z|[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+\Z")
_COMMENTED = """\
# The machines that clusterctl reaches{origin}. Check it with: clusterctl nodes, then clusterctl doctor
name: {name}

defaults:                         # for every node that does not say otherwise
  # user: alice                   # SSH's own choice where nothing is said
  # key: ~/.ssh/id_ed25519
  # port: 22
  # python: ~/venv/bin/python     # the Python that ranks run with on the node
  # workdir: ~/.clusterctl        # code, data and runs, on the node
  {devices:<32}# a count, a half-open range "[0,8)", or a list [0, 1]
  {kind:<32}# cpu, cuda or npu
  # interface: eth0               # the one that all nodes share; handed to gloo, NCCL and HCCL

nodes:
{nodes}
"""
_GROUPS = """\

# groups:
#   left: {first:<24}# then: clusterctl exec @left -- hostname
"""


def cluster_text(cluster: Cluster) -> str:
    """A cluster.yaml that reads back as the same nodes."""
    lines = [f"name: {_yaml(cluster.name)}", "nodes:", *_node_lines(cluster, {})]
    return "\n".join(lines + _shared_lines(cluster)) + "\n"


def commented(cluster: Cluster, origin: str = "") -> str:
    """A cluster.yaml of the same nodes to go on from: what most of them share stands above, once."""
    devices = Counter(node.devices for node in cluster.nodes).most_common(1)[0][0]
    kind = Counter(node.kind for node in cluster.nodes).most_common(1)[0][0]
    defaults: dict[str, Any] = {"devices": _device_value(devices), "kind": kind}
    text = _COMMENTED.format(
        origin=f", from {escape_controls(origin)}" if origin else "",
        name=_yaml(cluster.name),
        devices=f"devices: {_flow(defaults['devices'])} ",
        kind=f"kind: {kind} ",
        nodes="\n".join(_node_lines(cluster, defaults)),
    )
    beside = "".join(f"{line}\n" for line in _shared_lines(cluster))
    return (
        text
        + beside
        + ("" if cluster.groups else _GROUPS.format(first=f"{nodeset.fold(cluster.names[:2])} "))
    )


def _node_lines(cluster: Cluster, defaults: dict[str, Any]) -> list[str]:
    return [f"  {_yaml(node.name)}: {_flow(_said(node, defaults))}" for node in cluster.nodes]


def _shared_lines(cluster: Cluster) -> list[str]:
    lines = ["groups:"] if cluster.groups else []
    lines += [f"  {_yaml(name)}: {_yaml(','.join(names))}" for name, names in cluster.groups.items()]
    return lines + ([f"known_hosts: {_yaml(cluster.known_hosts)}"] if cluster.known_hosts else [])


def _said(node: Node, defaults: dict[str, Any]) -> dict[str, Any]:
    """What a node's line must say; the rest follows from its name and the defaults."""
    usual = Node(node.name, node.name, node.host, server_id=node.address)
    said = {
        item.name: getattr(node, item.name)
        for item in fields(Node)
        if getattr(node, item.name) != getattr(usual, item.name) and item.name not in ("devices", "kind")
    }
    alone = {"devices": 1, "kind": "cpu"} if node.kind == "cpu" else {"kind": "cpu"}
    own = {"kind": node.kind, "devices": _device_value(node.devices)}
    return {**said, **{key: value for key, value in own.items() if value != (defaults or alone).get(key)}}


def _device_value(devices: tuple[int, ...]) -> int | list[int]:
    """A count where the devices are the first ones."""
    return len(devices) if devices == tuple(range(len(devices))) else list(devices)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(one) for one in value) + "]"
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
