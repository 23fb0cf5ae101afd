"""Pushing and verifying rank tables, with nodes that answer from a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import InputFaults, UsageError, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.ranktable import live_table
from clusterctl.ranktable import push as live
from clusterctl.ranktable.verify import not_compared, unclaimed, verify
from clusterctl.transport.connection import Completed, Connection
from tests.support.scripted import ScriptedTransport

TABLE = {
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {
            "server_id": f"10.0.0.{server}",
            "device": [
                {"device_id": str(one), "device_ip": f"192.168.{one}.{server}", "rank_id": str(2 * server + one - 2)}
                for one in (0, 1)
            ],
        }
        for server in (1, 2)
    ],
    "status": "completed",
}  # fmt: skip
NODES = tuple(Node(f"node{n}", f"10.0.0.{n}", f"10.0.0.{n}", server_id=f"10.0.0.{n}") for n in (1, 2, 3))
PATH = "~/t.json"


def said(text: str, code: int = 0) -> Completed:
    return Completed(code, stdout=text.encode())


@pytest.fixture
def table(tmp_path: Path) -> live_table.LiveTable:
    (tmp_path / "t.json").write_text(json.dumps(TABLE))
    return live_table.read(tmp_path / "t.json")


def file(table: live_table.LiveTable, **other: Any) -> dict[str, Any]:
    return {"path": "/h/t.json", "kind": "f", "mode": 0o644, "size": 1, "sha256": table.sha256, **other}


def healthy(device: int) -> dict[tuple[str, str], Any]:
    tool = f"hccn_tool -i {device}"
    return {
        ("node1", f"{tool} -ip -g"): said(f"ipaddr:192.168.{device}.1\nnetmask:255.255.255.0\n"),
        ("node1", f"{tool} -link -g"): said("link status: UP\n"),
        ("node1", f"{tool} -net_health -g"): said("net health status: Success\n"),
    }


def drifts(
    table: live_table.LiveTable, node: Node = NODES[0], **answers: Any
) -> list[tuple[int | None, str, str]]:
    """What verify finds on node1 where all is well but for these answers, `ip0=...` for device 0's `-ip -g`."""
    script = {("node1", "fingerprint"): answers.pop("fingerprint", file(table)), **healthy(0), **healthy(1)}
    for name, answer in answers.items():
        words = "-ip -inet6" if name.startswith("six") else "-" + name[:-1]
        script["node1", f"hccn_tool -i {name[-1]} {words} -g"] = answer
    link = ScriptedTransport(script).connect(node)
    return [(one.device, one.kind, one.what) for one in verify(link, node, table, PATH).drifts]


def test_a_node_as_the_table_says_has_no_drift(table: live_table.LiveTable) -> None:
    assert drifts(table) == []


@pytest.mark.parametrize(
    ("found", "kind", "word"),
    [
        ({"path": "/h/t.json", "kind": ""}, "file-missing", "no such file"),
        ({"kind": "l"}, "file-kind", "a symbolic link; torch_npu would negotiate without it"),
        ({"kind": "d"}, "file-kind", "a folder"),
        ({"kind": "other"}, "file-kind", "not a regular file"),
        ({"mode": 0o044}, "file-unreadable", "can't be read by its owner (mode 44)"),
        ({"sha256": "0" * 64}, "file-differs", "other content: sha256 000000000000"),
    ],
)
def test_every_way_that_the_file_can_be_wrong_is_told_apart(
    table: live_table.LiveTable, found: dict[str, Any], kind: str, word: str
) -> None:
    seen = found if found.get("kind") == "" else file(table, **found)
    ((device, told, what),) = drifts(table, fingerprint=seen)
    assert (device, told) == (None, kind) and word in what


@pytest.mark.parametrize(
    ("answers", "kind", "word"),
    [
        ({"ip1": said("ipaddr:192.168.1.9\n")}, "address", "has 192.168.1.1, and hccn_tool shows 192.168.1.9"),
        ({"ip1": said("")}, "address", "no address: it is not configured"),
        ({"ip1": said("device is off", 1)}, "address", "-ip ended with 1: device is off"),
        ({"ip1": Completed(None, timed_out=True)}, "address", "did not end in time"),
        ({"link1": said("link status: DOWN\n")}, "link", "link is DOWN, not UP"),
        ({"link1": Completed(None, timed_out=True)}, "link", "did not end within 20 s"),
        ({"net_health1": said("net health status: Socket failed\n")}, "net_health", "is Socket failed, not Success"),
    ],
)  # fmt: skip
def test_a_drift_is_named_by_device(
    table: live_table.LiveTable, answers: dict[str, Any], kind: str, word: str
) -> None:
    ((device, told, what),) = drifts(table, **answers)
    assert (device, told) == (1, kind) and word in what


def test_what_the_tool_does_not_tell_is_no_drift(table: live_table.LiveTable) -> None:
    assert drifts(table, link0=said("unknown option", 1), net_health1=said("")) == []


def test_ipv6_is_asked_as_ipv6_and_compared_as_an_address(table: live_table.LiveTable) -> None:
    six = replace(table, servers={"10.0.0.1": {0: "fd00::1:0", 1: "fd00::1:1"}})
    answers = {"six0": said("ipv6_address:FD00:0::1:0\n"), "six1": said("ipv6_address:fd00::2:1\n")}
    assert [(device, kind) for device, kind, _ in drifts(six, **answers)] == [(1, "address")]


def test_on_a3_the_virtual_address_serves_too(table: live_table.LiveTable) -> None:
    a3 = replace(table, version="1.2", servers={"10.0.0.1": {0: "10.1.0.1", 1: "192.168.1.1"}})
    assert drifts(a3, vnic0=said("ipaddr:10.1.0.1\nnetmask:255.0.0.0\n")) == []
    assert [one[:2] for one in drifts(a3, vnic0=said("ipaddr:10.1.0.2\n"))] == [(0, "address")]


def test_a_node_without_the_tool_says_that_it_was_not_asked(table: live_table.LiveTable) -> None:
    script = {("node1", "fingerprint"): file(table), ("node1", "run"): Completed(127)}
    report = verify(ScriptedTransport(script).connect(NODES[0]), NODES[0], table, PATH)
    assert report.drifts == () and "hccn_tool is missing" in report.notes[0]


# -- A3: places in super pods

POD = "SDID : {}\nSuper Pod ID : {}\n"


def super_drifts(answers: dict[int, str], node: Node = NODES[0]) -> list[tuple[int | None, str, str]]:
    """Return the differences if npu-smi shows these super-device ids and everything else is correct."""
    table = live_table.LiveTable(
        b"",
        "1.2",
        {"10.0.0.1": {0: "192.168.0.1", 1: "192.168.1.1"}},
        {"10.0.0.1": {0: "70", 1: "71"}},
        {"10.0.0.1": "0"},
    )
    head = "NPU ID\tChip ID\tChip Logic ID\tChip Name\n"
    script = {("node1", "fingerprint"): file(table), **healthy(0), **healthy(1)}
    script["node1", "npu-smi info -m"] = said(f"{head}0\t0\t0\tAscend910\n0\t1\t1\tAscend910\n")
    for device, text in answers.items():
        script["node1", f"npu-smi info -t spod-info -i 0 -c {device}"] = said(text)
    report = verify(ScriptedTransport(script).connect(node), node, table, PATH)
    return [(one.device, one.kind, one.what) for one in report.drifts]


def test_super_device_ids_are_compared_with_what_npu_smi_says_now() -> None:
    assert super_drifts({0: POD.format(70, 0), 1: POD.format(71, 0)}) == []
    assert super_drifts({0: POD.format(70, 0), 1: POD.format(75, 0)}) == [
        (1, "super_device", "the super-device id is 75, and the table has 71")
    ]
    ((device, kind, what),) = super_drifts({0: "not supported\n", 1: POD.format(71, 0)})
    assert (device, kind) == (0, "super_device") and what.startswith("the super-device id is none,")


def test_a_node_that_moved_to_another_super_pod_is_named_once() -> None:
    moved = {0: POD.format(70, 3), 1: POD.format(71, 3)}
    assert super_drifts(moved) == [(None, "super_pod", "the super pod is 3, and the table has 0")]
    assert super_drifts(moved, replace(NODES[0], super_pod="0")) == [], "the inventory's word"


def test_a_node_without_npu_smi_says_that_super_device_ids_were_not_asked() -> None:
    table = live_table.LiveTable(b"", "1.2", {"10.0.0.1": {0: "192.168.0.1"}}, {"10.0.0.1": {0: "70"}})
    script = {("node1", "fingerprint"): file(table), ("*", "run"): Completed(127), **healthy(0)}
    report = verify(ScriptedTransport(script).connect(NODES[0]), NODES[0], table, PATH)
    assert report.drifts == () and report.notes == ("npu-smi is missing: super-device ids were not compared",)


# -- version 2.0: no server is named, so the addresses tell


def ranks_table(tmp_path: Path, addresses: list[tuple[str, str]]) -> live_table.LiveTable:
    """A 2.0 table of nodes of two devices, with an address (and its type) for each rank."""
    ranks = [
        {
            "rank_id": rank, "local_id": rank % 2, "device_id": rank % 2,
            "level_list": [{
                "net_layer": 0, "net_instance_id": f"rack{rank // 2}", "net_type": "CLOS", "net_attr": "",
                "rank_addr_list": [{"addr_type": kind, "addr": address, "ports": ["0/0"]}],
            }],
        }
        for rank, (kind, address) in enumerate(addresses)
    ]  # fmt: skip
    value = {"version": "2.0", "rank_count": len(ranks), "status": "completed", "rank_list": ranks}
    (tmp_path / "t.json").write_text(json.dumps(value))
    return live_table.read(tmp_path / "t.json")


@pytest.fixture
def ranks(tmp_path: Path) -> live_table.LiveTable:
    """node1's devices as ranks 2 and 3: the order of the inventory is not the table's."""
    return ranks_table(
        tmp_path, [("IPV4", f"192.168.{device}.{node}") for node in (2, 1) for device in (0, 1)]
    )


def verified(table: live_table.LiveTable, **answers: Any) -> live.NodeReport:
    script = {("node1", "fingerprint"): file(table), ("*", "run"): said(""), **healthy(0), **healthy(1)}
    for name, answer in answers.items():
        script["node1", f"hccn_tool -i {name[-1]} -{name[:-1]} -g"] = answer
    return verify(ScriptedTransport(script).connect(NODES[0]), NODES[0], table, PATH)


def test_a_nodes_ranks_in_2_0_are_those_that_have_its_addresses(ranks: live_table.LiveTable) -> None:
    report = verified(ranks)
    assert (report.drifts, report.notes, report.devices) == ((), (), 2)
    assert report.group is not None and report.group.ranks == range(2, 4)
    (left,) = unclaimed(ranks, [report])
    assert str(left) == "ranks [0,2): no node of the inventory has these addresses"
    assert "net_instance_id" in not_compared(ranks)[0] and len(not_compared(ranks)) == 1


def test_an_address_and_a_link_that_drifted_from_a_2_0_table_are_named_by_device(
    ranks: live_table.LiveTable,
) -> None:
    report = verified(ranks, ip1=said("ipaddr:192.168.1.77\n"), link0=said("link status: DOWN\n"))
    assert [(one.device, one.kind) for one in report.drifts] == [(0, "link"), (1, "address")]
    assert "the address is 192.168.1.77, and the table has 192.168.1.1" in report.drifts[1].what
    elsewhere = verified(ranks, ip0=said("ipaddr:10.1.1.1\n"), ip1=said("ipaddr:10.1.1.2\n"))
    assert [(one.kind, one.what) for one in elsewhere.drifts] == [
        ("server", "none of its addresses is in the table: 10.1.1.1, 10.1.1.2")
    ]
    assert unclaimed(ranks, [elsewhere]) == []


def test_what_could_not_be_compared_in_2_0_is_said(tmp_path: Path, ranks: live_table.LiveTable) -> None:
    assert verified(ranks, ip1=said("")).notes == ("device 1: hccn_tool shows no address",)
    silent = verified(ranks, ip0=said(""), ip1=said(""))
    assert (silent.drifts, silent.notes) == ((), ("hccn_tool shows no address: none was compared",))
    eids = ranks_table(tmp_path, [("EID", f"000000000000002000100000df00100{rank}") for rank in (1, 2)])
    assert verified(eids, link0=said("link status: DOWN\n")).drifts[0].kind == "link"
    assert "the addresses of 2 ranks" in not_compared(eids)[1]


# -- push


class Disk(Connection):
    """A node with one file, which returns what was written unless the test makes it return something else."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any] | None = None) -> None:
        super().__init__("node1")
        self.found, self.after, self.put_bytes = before, after, b""

    def call(self, op: str, params: Any = None, body: Any = None) -> dict[str, Any]:
        assert op == "fingerprint"
        return {"path": "/h/t.json", **self.found}

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        import hashlib

        self.put_bytes = data
        there = {"kind": "f", "mode": mode, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        self.found = self.after or there


@pytest.mark.parametrize(
    ("before", "change"), [({"kind": ""}, "new"), ({"kind": "l"}, "replaced"), (None, "unchanged")]
)
def test_a_push_says_what_it_changed(
    table: live_table.LiveTable, before: dict[str, Any] | None, change: str
) -> None:
    disk = Disk(before if before is not None else file(table))
    done = live.push(disk, table, PATH)
    assert (done.change, done.sha256) == (change, table.sha256)
    assert disk.put_bytes == (b"" if change == "unchanged" else table.data)


def test_a_push_believes_the_hash_alone(table: live_table.LiveTable) -> None:
    with pytest.raises(WorkFailed, match="other content"):
        live.push(Disk({"kind": ""}, file(table, sha256="1" * 64)), table, PATH)
    with pytest.raises(WorkFailed, match="is a folder"):
        live.push(Disk({"kind": "d", "mode": 0o755}), table, PATH)


# -- refused before any node is contacted


def test_a_table_that_hccl_would_refuse_goes_nowhere(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({**TABLE, "status": "initializing", "server_count": 2}))
    with pytest.raises(InputFaults) as caught:
        live_table.read(tmp_path / "t.json")
    assert {fault.where.rpartition(" ")[2] for fault in caught.value.faults} == {"/status", "/server_count"}


def test_the_name_on_the_nodes_ends_in_json() -> None:
    assert live.checked_path(live.default_path(Path("a/t.json"))) == "~/t.json"
    for path in ("~/t", "/x/.json", "~/t.json/"):
        with pytest.raises(UsageError, match="HCCL opens no rank table there"):
            live.checked_path(path)


def test_the_nodes_of_a_table_are_those_that_it_names(table: live_table.LiveTable) -> None:
    cluster = Cluster("c", NODES)
    assert [node.name for node in live_table.nodes_of(cluster, table, chosen=False)] == ["node1", "node2"]
    assert live_table.missing_servers(Cluster("c", NODES[1:]), table) == ["10.0.0.1"]
    with pytest.raises(InputFaults, match=r"the table has no server 10\.0\.0\.3"):
        live_table.nodes_of(cluster, table, chosen=True)
    with pytest.raises(InputFaults, match="no server"):
        live_table.nodes_of(Cluster("c", NODES[2:]), table, chosen=False)
