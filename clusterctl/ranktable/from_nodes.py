"""Build one table from the answers of the nodes, for `ranktable build` and for a launch.

A5 nodes read version 2.0, A3 nodes 1.2, A2 nodes 1.0; a table of the wrong version ends every job on several devices
(EI0014). So each node is also asked for its hardware, unless the user names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterctl.errors import Fault, InputFaults
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.ranktable import api, devices, root_info
from clusterctl.ranktable.api import RankTable
from clusterctl.ranktable.finding import version_for
from clusterctl.ranktable.table import Device, DeviceAddress
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, on_all


@dataclass(frozen=True)
class NodeDevices:
    """The answer of one node: its hardware (None if it does not say) and the addresses of its devices."""

    hardware: str | None
    addresses: list[DeviceAddress]
    ranks: tuple[Device, ...] = ()
    """Of an a5 node: its devices as its own file describes them."""


@dataclass(frozen=True)
class BuiltTable:
    """A table built from the answers of nodes, and what the user should know about it."""

    table: RankTable
    detected: str = ""
    """A sentence about the hardware that the nodes named, if it decided the version."""
    left_out: tuple[str, ...] = ()
    """Sentences about nodes and devices that were left out."""
    other_sources: tuple[str, ...] = ()
    """Sentences about addresses that did not come from hccn_tool."""


def build_from_nodes(
    cluster: Cluster,
    connections: Connections,
    which: Sequence[int] | None = None,
    hardware: str | None = None,
    skip_incomplete: bool = False,
    of_run: bool = False,
) -> BuiltTable:
    """Ask all nodes in parallel for these devices (default: those of the inventory) and build their table.

    Raise an error that names every node that failed. `of_run`: no other node joins later, so that the devices of a
    single one need no addresses.
    """
    found = on_all(
        connections,
        cluster.nodes,
        lambda node, link: _query(
            link, node, which, hardware, skip_incomplete, of_run and len(cluster.nodes) == 1
        ),
    )
    answers = [(node, found[node.name]) for node in cluster.nodes]
    common = hardware or common_hardware(answers)
    if version_for(common) == "2.0":
        return _from_files(answers, which, common, hardware)
    entries = [(node, answer.addresses) for node, answer in answers]
    complete, left_out = api.complete(entries, which) if skip_incomplete else (entries, [])
    detected = "" if hardware or common in (None, "a2") else _describe(answers, str(common))
    return BuiltTable(api.build(complete, common), detected, tuple(left_out), tuple(_other_sources(answers)))


def _from_files(
    answers: Sequence[tuple[Node, NodeDevices]],
    which: Sequence[int] | None,
    common: str | None,
    hardware: str | None,
) -> BuiltTable:
    """Return the table of a5 nodes, from the devices that their files describe."""
    wanted = {node.name: node.devices if which is None else tuple(which) for node, _ in answers}
    found = {node.name: {device.device_id for device in answer.ranks} for node, answer in answers}
    absent = {name: [device for device in wanted[name] if device not in found[name]] for name in wanted}
    left_out = [
        f"{name}: not in {root_info.ROOT_INFO}: device {', '.join(map(str, devices))}"
        for name, devices in absent.items()
        if devices
    ]
    table = root_info.table_of([(node, answer.ranks) for node, answer in answers], common)
    return BuiltTable(table, "" if hardware else _describe(answers, str(common)), tuple(left_out))


def _query(
    connection: Connection,
    node: Node,
    which: Sequence[int] | None,
    hardware: str | None,
    skip: bool,
    alone: bool,
) -> NodeDevices:
    """Return the hardware of one node and the addresses of its devices."""
    wanted = node.devices if which is None else tuple(which)
    smi = devices.find_smi(connection, node) if wanted and hardware is None else None
    generation = hardware or (devices.generation(connection, smi, wanted[0]) if wanted else None)
    if generation == "a5":
        return NodeDevices(generation, [], root_info.read_root_info(connection, node, wanted, skip))
    addresses = devices.read_addresses(connection, node, which, generation, skip, smi, alone)
    return NodeDevices(generation, addresses)


def common_hardware(answers: Sequence[tuple[Node, NodeDevices]]) -> str | None:
    """Return the hardware of all nodes; raise InputFaults if they read different versions of tables."""
    groups: dict[str | None, list[str]] = {}
    for node, answer in answers:
        groups.setdefault(answer.hardware, []).append(node.name)
    versions = {version_for(name) for name in groups}
    if len(versions) > 1:
        faults = [
            Fault(nodeset.fold(names), f"{name or 'unknown hardware'}: needs version {version_for(name)}")
            for name, names in groups.items()
        ]
        remedy = (
            "choose nodes of one kind with -n; if a node reports the wrong kind, use --for a2 or --for a3"
        )
        raise InputFaults(faults, f"a table has one version\n{remedy}")
    return next((name for name in groups if name), None)


def _other_sources(answers: Sequence[tuple[Node, NodeDevices]]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for node, answer in answers:
        for source in sorted({address.source for address in answer.addresses} - {""}):
            names.setdefault(source, []).append(node.name)
    for source, nodes in names.items():
        yield f"{nodeset.fold(nodes)}: some addresses are from {source}; hccn_tool has none for these devices"


def _describe(answers: Sequence[tuple[Node, NodeDevices]], hardware: str) -> str:
    names = nodeset.fold([node.name for node, _ in answers])
    verb = "is" if len(answers) == 1 else "are"
    return f"{names} {verb} {hardware} according to npu-smi: version {version_for(hardware)}"
