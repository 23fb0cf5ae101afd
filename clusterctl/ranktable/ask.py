"""One table of the nodes' own answers, and for which hardware: the same for `ranktable build` and for a launch.

An A3 node reads version 1.2 and an A2 node 1.0; a table of the wrong version ends every job of several devices
(EI0014). So each node is asked what it is on the visit that asks its addresses, unless someone says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import Fault, InputFaults
from clusterctl.inventory import nodeset
from clusterctl.ranktable import api, devices
from clusterctl.ranktable.api import RankTable
from clusterctl.ranktable.devices import DeviceAddress
from clusterctl.ranktable.finding import version_for
from clusterctl.transport.fanout import raise_failures

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.transport.fanout import Connection, Connections


@dataclass(frozen=True)
class Told:
    """What one node said: which hardware it is, None where it does not say, and its devices' addresses."""

    hardware: str | None
    addresses: list[DeviceAddress]


@dataclass(frozen=True)
class Asked:
    """A table of the nodes' answers."""

    table: RankTable
    detected: str = ""
    """In words, the hardware that the nodes named, where it decides the table's version."""
    left_out: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """In words, whose addresses hccn_tool itself did not tell, and who did."""


def ask_nodes(
    cluster: Cluster,
    connections: Connections,
    which: Sequence[int] | None = None,
    hardware: str | None = None,
    skip_incomplete: bool = False,
) -> Asked:
    """Ask every node at once for these devices, its own where none are named; every node that fails is named."""
    api.buildable(hardware)
    outcomes = connections.on_each(
        cluster.nodes, lambda node, link: _ask_one(link, node, which, hardware, skip_incomplete)
    )
    raise_failures(outcomes)
    told = [(outcome.node, outcome.get()) for outcome in outcomes]
    found = hardware or alike(told)
    api.buildable(found)
    entries = [(node, one.addresses) for node, one in told]
    kept, left_out = api.complete(entries, which) if skip_incomplete else (entries, [])
    detected = "" if hardware or found in (None, "a2") else _words(told, str(found))
    return Asked(api.build(kept, found), detected, tuple(left_out), tuple(_elsewhere(told)))


def _ask_one(
    connection: Connection, node: Node, which: Sequence[int] | None, hardware: str | None, skip: bool
) -> Told:
    wanted = node.devices if which is None else tuple(which)
    smi = devices.find_smi(connection, node) if wanted and hardware is None else None
    found = hardware or (devices.generation(connection, smi, wanted[0]) if wanted else None)
    # Its networks are in no answer; the whole table is refused.
    if found == "a5":
        return Told(found, [])
    return Told(found, devices.ask(connection, node, which, found, skip, smi))


def alike(told: Sequence[tuple[Node, Told]]) -> str | None:
    """The one hardware of all nodes; two that read different versions are refused, each node by name."""
    groups: dict[str | None, list[str]] = {}
    for node, one in told:
        groups.setdefault(one.hardware, []).append(node.name)
    versions = {version_for(name) for name in groups}
    if len(versions) > 1:
        faults = [
            Fault(nodeset.fold(names), f"{name or 'does not say what it is'}: version {version_for(name)}")
            for name, names in groups.items()
        ]
        remedy = "choose nodes of one kind with -n; where a node names itself wrongly, --for a2 or --for a3 decides"
        raise InputFaults(faults, f"one table holds one version\n{remedy}")
    return next((name for name in groups if name), None)


def _elsewhere(told: Sequence[tuple[Node, Told]]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for node, one in told:
        for source in sorted({address.source for address in one.addresses} - {""}):
            names.setdefault(source, []).append(node.name)
    for source, those in names.items():
        yield f"{nodeset.fold(those)}: hccn_tool gave no address for some devices, {source} did"


def _words(told: Sequence[tuple[Node, Told]], hardware: str) -> str:
    names = nodeset.fold([node.name for node, _ in told])
    return (
        f"{names} {'is' if len(told) == 1 else 'are'} {hardware} by npu-smi: version {version_for(hardware)}"
    )
