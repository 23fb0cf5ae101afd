"""The rules for input written by users: rank tables, hostfiles, node sets, inventories and plans."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from clusterctl.document import parse_document
from clusterctl.errors import ClusterctlError, InputFaults
from clusterctl.hostfile import detect, formats, node_lists
from clusterctl.hostfile import filter as hostfile_filter
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory import nodeset
from clusterctl.ranktable import api, check, plan
from tests.fuzz.inputs import CLUSTERS, HOSTFILES, PLANS, SETS, Reader, mutate_json, mutate_text, tables


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def read_table(data: bytes) -> Any:
    """Check and parse a rank table: both must agree."""
    findings = api.check(data)
    for entry in findings:
        assert entry.code and entry.what and entry.remedy, f"a finding without a message: {entry}"
    try:
        table = api.parse(data)
    except InputFaults as error:
        assert findings, f"parse refused what check passed: {error}"
        raise
    assert {finding.code for finding in findings} <= {"dialect"}, "parse accepted what check refused"
    return table


def is_written_alike(table: Any) -> bool:
    text = table.render()
    assert not api.check(text), "the written table is refused"
    assert api.parse(text) == table, "the written table reads back as another table"
    return True


def host_file(data: bytes) -> bool:
    """Read a hostfile with every reader: entries must have valid names and be unchanged after writing and reading."""
    text, read = text_of(data), False
    for inspect in (formats.inspect_text, node_lists.inspect_text):
        entries, faults = inspect(text, "hosts")
        assert entries or faults, "neither nodes nor faults"
        for fault in faults:
            assert fault.where and fault.what, f"a fault without a place or a message: {fault}"
        read = read or not faults
        for entry in [] if faults else entries:
            assert not nodeset.name_fault(entry.address), entry
            assert entry.slots is None or 0 < entry.slots <= formats.MAX_SLOTS, entry
        if not faults and len(entries) <= 1000:
            _host_round_trip(entries, text)
    return read


def _host_round_trip(entries: list[formats.Entry], text: str) -> None:
    for form in formats.FORMATS:
        if form == "mpich" and any(":" in entry.address for entry in entries):
            # This format refuses such addresses; another test checks that.
            continue
        again = formats.parse(formats.render_entries(entries, form))
        assert [(entry.address, entry.slots) for entry in again] == [
            (entry.address, entry.slots) for entry in entries
        ]
    bare = [formats.Entry(entry.address.replace(":", ""), entry.slots) for entry in entries]
    if len({entry.address for entry in bare}) == len(bare) and not any(
        "%" in entry.address for entry in bare
    ):
        again, faults = node_lists.inspect_text(node_lists.render(bare), "hosts")
        assert not faults, faults
        assert [entry.address for entry in again] == [entry.address for entry in bare]
    with contextlib.suppress(ClusterctlError):
        slots = {entry.address: range(min(entry.slots or 1, 64)) for entry in entries}
        left = hostfile_filter.chosen(slots, text[:40] or None, None)
        assert left and set(left) <= set(slots)


GROUPS: dict[str, str | tuple[str, ...]] = {
    "old": "node[1-4]",
    "new": ("node[5-7]", "n1"),
    "both": "@old,@new",
    "loop": "@loop",
    "rack1": "r1n[1-9]",
    "rack2": "r2n[1-9]",
}
KNOWN = [
    *(f"node{number}" for number in range(1, 12)),
    "n1",
    *(f"r{r}n{n}" for r in (1, 2) for n in range(1, 10)),
]


def node_set(data: bytes) -> list[str]:
    if len(data) % 2:
        with contextlib.suppress(ClusterctlError):
            nodeset.select(text_of(data), KNOWN, GROUPS)
    return nodeset.expand(text_of(data), GROUPS, KNOWN)


def is_folded_alike(names: list[str]) -> bool:
    """The folded text must expand to the same names."""
    assert len(names) <= nodeset.LIMIT, f"{len(names)} names"
    assert len(set(names)) == len(names), "a name twice"
    if names and len(names) <= 300:
        faults = list(filter(None, map(nodeset.name_fault, names)))
        assert not faults, faults[0]
        folded = nodeset.fold(names)
        assert nodeset.expand(folded) == names, folded
    return True


def cluster_yaml(folder: Path) -> inventory_cluster.Cluster:
    """Read the text as strict YAML, and as a file that may be an inventory of any kind."""
    with contextlib.suppress(ClusterctlError):
        parse_document(text_of((folder / "cluster.yaml").read_bytes()), "cluster.yaml")
    return inventory_cluster.load(folder / "cluster.yaml")


def has_nodes(cluster: inventory_cluster.Cluster) -> bool:
    assert cluster.nodes and len(set(cluster.names)) == len(cluster.names)
    assert all(not nodeset.name_fault(name) for name in cluster.names)
    return True


def gives_the_same_table(table: Any) -> bool:
    """The check must accept a planned table, and the table's own plan must give the same table."""
    assert not api.check(table.render()), "the table made from a plan is refused"
    if not plan.losses(table):
        assert plan.plan_table(parse_document(plan.render_plan(table), "plan")) == table
    return True


def any_file(folder: Path) -> inventory_cluster.Cluster:
    """Read a file whose kind is detected from its content, as in `-c FILE` and `check`."""
    path = folder / "nodes"
    if path.stat().st_size % 2:
        path = path.rename(folder / "nodes.json")
    check.check_file(path)
    detect.read(path)
    return detect.load(path)


VALID = [json.dumps(table) for table in tables()]
EVERYTHING = [*VALID, *HOSTFILES, *CLUSTERS]
READERS = {
    "nodeset": Reader(lambda random: mutate_text(random, list(SETS)), node_set, is_folded_alike, own=5000),
    "hostfile": Reader(lambda random: mutate_text(random, list(HOSTFILES)), host_file, refusals=(), own=2800),
    "ranktable": Reader(lambda random: mutate_json(random, VALID), read_table, is_written_alike, own=560),
    "inventory": Reader(
        lambda random: mutate_text(random, list(CLUSTERS)), cluster_yaml, has_nodes, "cluster.yaml"
    ),
    "plan": Reader(
        lambda random: mutate_text(random, list(PLANS)),
        lambda data: plan.plan_table(parse_document(text_of(data), "plan")),
        gives_the_same_table,
        own=190,
    ),
    "anyfile": Reader(
        lambda random: mutate_text(random, EVERYTHING), any_file, lambda cluster: bool(cluster.nodes), "nodes"
    ),
}
