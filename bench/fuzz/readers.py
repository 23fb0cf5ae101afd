"""The rules for input written by users: rank tables, hostfiles, node sets, inventories and plans.

Each function reads one input and returns "read" or "refused"; it raises AssertionError if a rule is broken.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clusterctl.cli.screen import safe
from clusterctl.document import parse_document
from clusterctl.errors import ClusterctlError, InputFaults
from clusterctl.hostfile import (
    detect,
    formats,
    slurm,
)
from clusterctl.hostfile import (
    filter as hostfile_filter,
)
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory import nodeset
from clusterctl.ranktable import api, check, plan


def check_wording(error: ClusterctlError) -> None:
    assert error.message.strip(), "a refusal without a message"
    safe(f"{error.message}\n{error.hint}").plain.encode()
    for fault in error.faults if isinstance(error, InputFaults) else ():
        assert fault.where and fault.what, f"a fault without a place or a message: {fault}"


def rank_table(data: bytes) -> str:
    """Check and parse a rank table: both must agree, and a valid table must be unchanged after writing and reading."""
    findings = api.check(data)
    for entry in findings:
        assert entry.code and entry.what and entry.remedy, f"a finding without a message: {entry}"
    try:
        table = api.parse(data)
    except ClusterctlError as error:
        check_wording(error)
        assert findings or not isinstance(error, InputFaults), f"parse refused what check passed: {error}"
        return "refused"
    codes = {finding.code for finding in findings}
    assert codes <= {"dialect"}, "parse accepted what check refused"
    text = table.render()
    assert not api.check(text), "the written table is refused"
    assert api.parse(text) == table, "the written table reads back as another table"
    return "read"


def host_file(data: bytes) -> str:
    """Read a hostfile with every reader: entries must have valid names and be unchanged after writing and reading."""
    text = data.decode("utf-8", "surrogateescape")
    results = []
    for read in (formats.inspect_text, slurm.inspect_text):
        entries, faults = read(text, "hosts")
        assert entries or faults, "neither nodes nor faults"
        for fault in faults:
            assert fault.where and fault.what, f"a fault without a place or a message: {fault}"
        results.append("refused" if faults else "read")
        for entry in [] if faults else entries:
            assert not nodeset.name_fault(entry.address), entry
            assert entry.slots is None or 0 < entry.slots <= formats.MAX_SLOTS, entry
        if not faults and len(entries) <= 1000:
            _host_round_trip(entries, text)
    return "read" if "read" in results else "refused"


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
        again, faults = slurm.inspect_text(slurm.render(bare), "hosts")
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


def node_set(data: bytes) -> str:
    """Expand, select and fold a node set; the folded text must expand to the same names."""
    text = data.decode("utf-8", "surrogateescape")
    if len(data) % 2:
        try:
            nodeset.select(text, KNOWN, GROUPS)
        except ClusterctlError as error:
            check_wording(error)
    try:
        names = nodeset.expand(text, GROUPS, KNOWN)
    except ClusterctlError as error:
        check_wording(error)
        return "refused"
    assert len(names) <= nodeset.LIMIT, f"{len(names)} names"
    assert len(set(names)) == len(names), "a name twice"
    if names and len(names) <= 300:
        faults = list(filter(None, map(nodeset.name_fault, names)))
        assert not faults, faults[0]
        folded = nodeset.fold(names)
        assert nodeset.expand(folded) == names, folded
    return "read"


def cluster_yaml(data: bytes) -> str:
    """Read the text as strict YAML, and as a file that may be an inventory of any kind."""
    try:
        parse_document(data.decode("utf-8", "surrogateescape"), "cluster.yaml")
    except ClusterctlError as error:
        check_wording(error)
    with _a_file(data, "cluster.yaml") as path:
        try:
            cluster = inventory_cluster.load(path)
        except ClusterctlError as error:
            check_wording(error)
            return "refused"
    assert cluster.nodes and len(set(cluster.names)) == len(cluster.names)
    assert all(not nodeset.name_fault(name) for name in cluster.names)
    return "read"


def table_plan(data: bytes) -> str:
    """Make a table from a plan: the check must accept it, and the table's own plan must give the same table."""
    try:
        table = plan.plan_table(parse_document(data.decode("utf-8", "surrogateescape"), "plan"))
    except ClusterctlError as error:
        check_wording(error)
        return "refused"
    assert not api.check(table.render()), "the table made from a plan is refused"
    if not plan.losses(table):
        assert plan.plan_table(parse_document(plan.render_plan(table), "plan")) == table
    return "read"


def any_file(data: bytes) -> str:
    """Read a file whose kind is detected from its content, as in `-c FILE` and `check`."""
    with _a_file(data, "nodes.json" if len(data) % 2 else "nodes") as path:
        check.check_file(path)
        try:
            detect.read(path)
            cluster = detect.load(path)
        except ClusterctlError as error:
            check_wording(error)
            return "refused"
    assert cluster.nodes
    return "read"


@contextlib.contextmanager
def _a_file(data: bytes, name: str) -> Iterator[Path]:
    path = Path(tempfile.gettempdir()) / f"clusterctl-fuzz-{os.getpid()}-{name}"
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink()
