from __future__ import annotations

import doctest
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.errors import InputFaults, UsageError
from clusterctl.inventory.cluster import Node
from clusterctl.ranktable import api
from clusterctl.ranktable.api import (
    Device,
    RankTable,
    Server,
    SuperPod,
    build,
    check,
    complete,
    file_name,
    in_order,
    load,
    load_all,
    merge,
    parse,
    renumbered,
    save,
)
from clusterctl.ranktable.edit import (
    diff,
    parse_ranks,
    slice_table,
    to_version,
)
from clusterctl.ranktable.table import DeviceAddress

EXAMPLES = Path(__file__).parents[3] / "rank_tables"
CASES = Path(__file__).parents[2] / "cases" / "ranktable"


def node(name: str, address: str, server_id: str = "") -> Node:
    return Node(
        name, host=address, address=address, devices=(0, 1), kind="npu", server_id=server_id or address
    )


def one_server(number: int, devices: int = 2, version: str = "1.0") -> RankTable:
    made = tuple(
        Device(
            place,
            f"192.{place + 1}.0.{number}",
            place,
            str(1000 * number + place) if version == "1.2" else None,
        )
        for place in range(devices)
    )
    server = f"10.0.0.{number}"
    pods = (SuperPod("0", (server,)),) if version == "1.2" else ()
    return RankTable((Server(server, made),), version, pods)


def whole(*numbers: int, devices: int = 2) -> RankTable:
    return merge([(f"{number}.json", one_server(number, devices)) for number in numbers])


@st.composite
def tables(draw: st.DrawFn) -> RankTable:
    counts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    version = draw(st.sampled_from(["1.0", "1.2"]))
    parts = [(f"{place}.json", one_server(place + 1, count, version)) for place, count in enumerate(counts)]
    table = merge(draw(st.permutations(parts)))
    return replace(
        table, extras=draw(st.sampled_from([{}, {"hardware_type": "910", "more": {"a": [1, None]}}]))
    )


# -- reading and writing


@given(tables())
@settings(max_examples=60, deadline=None)
def test_a_table_survives_being_written_and_read(table: RankTable) -> None:
    assert parse(table.render()) == table
    assert check(table.render()) == []


@given(tables(), st.data())
@settings(max_examples=60, deadline=None)
def test_slices_merge_to_the_whole(table: RankTable, data: st.DataObject) -> None:
    servers = [server.server_id for server in table.servers]
    parts = [("part", slice_table(table, servers=[name])) for name in servers]
    assert merge(parts) == table
    at = data.draw(st.integers(0, len(servers)))
    for names in (servers[:at], servers[at:]):
        if names:
            assert [one.server_id for one in slice_table(table, servers=names).servers] == names


def test_the_layout_is_the_vendors() -> None:
    assert whole(1).render() == (
        '{\n    "version": "1.0",\n    "server_count": "1",\n    "server_list": [\n        {\n'
        '            "server_id": "10.0.0.1",\n            "device": [\n                {\n'
        '                    "device_id": "0",\n                    "device_ip": "192.1.0.1",\n'
        '                    "rank_id": "0"\n                },\n                {\n'
        '                    "device_id": "1",\n                    "device_ip": "192.2.0.1",\n'
        '                    "rank_id": "1"\n                }\n            ],\n'
        '            "host_nic_ip": "reserve"\n        }\n    ],\n    "status": "completed"\n}\n'
    )


def test_the_old_form_is_read_as_version_1_0() -> None:
    case = json.loads((CASES / "good-old-form.json").read_text())
    table = parse(json.dumps(case["table"]))
    assert (table.version, [server.server_id for server in table.servers], table.ranks) == (
        "1.0",
        ["10.0.0.1"],
        2,
    )
    assert check(table.render()) == []


def ranks_2_0(*servers: int) -> RankTable:
    """A 2.0 table of so many devices a server."""
    value: dict[str, Any] = {"version": "2.0", "rank_count": sum(servers), "status": "completed"}
    value["rank_list"] = []
    for number, count in enumerate(servers):
        for local in range(count):
            place = {"addr_type": "IPV4", "addr": f"223.0.{number}.{local}", "ports": ["0/0"]}
            level = {"net_layer": 0, "net_instance_id": "az0-rack0", "net_type": "TOPO_FILE_DESC"}
            value["rank_list"].append(
                {
                    "rank_id": len(value["rank_list"]), "local_id": local, "device_id": local,
                    "level_list": [{**level, "net_attr": "", "rank_addr_list": [place]}],
                }
            )  # fmt: skip
    return parse(json.dumps(value))


def test_version_2_0_is_written_as_it_was_read_with_numbers() -> None:
    case = json.loads((CASES / "good-2.0.json").read_text())
    table = parse(json.dumps(case["table"]))
    assert json.loads(table.render()) == case["table"]
    assert list(json.loads(table.render())) == ["version", "rank_count", "status", "rank_list"]
    assert [(row["rank"], row["server"], row["address"]) for row in table.rows()] == [
        (0, "node0", "223.0.0.10"), (1, "node0", "223.0.0.11"),
    ]  # fmt: skip


def test_the_servers_of_version_2_0_are_counted_where_local_ids_begin_anew() -> None:
    table = ranks_2_0(3, 2)
    assert [(one.server_id, len(one.devices)) for one in table.servers] == [("node0", 3), ("node1", 2)]
    parts = [("a", slice_table(table, servers=["node0"])), ("b", slice_table(table, servers=["node1"]))]
    assert [device.rank_id for _, device in parts[1][1].by_rank()] == [0, 1]
    assert merge(parts) == table
    assert [one.rank for one in diff(table, merge(list(reversed(parts))))] == [0, 1, 2, 3, 4]


def test_version_2_0_is_merged_with_itself_by_nobody() -> None:
    with pytest.raises(InputFaults, match=r"address 223\.0\.0\.0 is also at a rank 0"):
        merge([("a", ranks_2_0(2)), ("b", ranks_2_0(2))])
    with pytest.raises(UsageError, match="names no servers"):
        in_order([("a", ranks_2_0(2))], "name")


def test_a_bad_table_names_its_file_and_every_pointer(tmp_path: Path) -> None:
    bad = whole(1).as_json()
    bad["status"], bad["server_list"][0]["device"][1]["rank_id"] = "initializing", 1
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    with pytest.raises(InputFaults) as caught:
        load(tmp_path / "bad.json")
    assert [one.where.split()[-1] for one in caught.value.faults] == [
        "/server_list/0/device/1/rank_id",
        "/status",
    ]
    assert all(str(tmp_path / "bad.json") in one.where for one in caught.value.faults)


def test_the_faults_of_several_files_come_at_once(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{")
    with pytest.raises(InputFaults) as caught:
        load_all([tmp_path / "a.json", tmp_path / "none.json", tmp_path / "b.json"])
    assert [fault.what[:8] for fault in caught.value.faults] == ["not JSON", "no such ", "not JSON"]


# -- building


def test_build_numbers_ranks_node_by_node() -> None:
    addresses = [
        [DeviceAddress(4, "192.1.0.1"), DeviceAddress(5, "192.2.0.1")],
        [DeviceAddress(0, "192.1.0.2")],
    ]
    table = build(list(zip([node("a", "10.0.0.1"), node("b", "10.0.0.2")], addresses, strict=True)))
    places = [(server.server_id, device.device_id, device.rank_id) for server, device in table.by_rank()]
    assert places == [("10.0.0.1", 4, 0), ("10.0.0.1", 5, 1), ("10.0.0.2", 0, 2)]
    assert check(table.render()) == []


def test_devices_in_any_order_give_ranks_in_that_order() -> None:
    addresses = [DeviceAddress(device, f"192.{device}.0.1") for device in (7, 4, 5)]
    table = build([(node("a", "10.0.0.1"), addresses)])
    assert [device.device_id for _, device in table.by_rank()] == [7, 4, 5]
    assert file_name(table) == "hccl_3p_745_10.0.0.1.json"


def test_a_node_at_127_is_never_written() -> None:
    with pytest.raises(InputFaults) as caught:
        build([(node("a", "127.0.1.1"), [DeviceAddress(0, "192.1.0.1")])])
    assert "a" in str(caught.value) and "127.0.1.1" in str(caught.value) and "server_id" in str(caught.value)


def test_build_names_every_node_at_fault() -> None:
    entries = [
        (node("a", "10.0.0.1"), []),
        (node("b", "10.0.0.2"), [DeviceAddress(3, "")]),
    ]
    with pytest.raises(InputFaults) as caught:
        build(entries)
    assert [one.where for one in caught.value.faults] == ["a", "b"]
    assert "device 3" in str(caught.value)


def test_two_nodes_with_one_server_id_are_refused_by_name() -> None:
    addresses = [[DeviceAddress(0, "192.1.0.1")], [DeviceAddress(0, "192.1.0.2")]]
    with pytest.raises(InputFaults) as caught:
        build(list(zip([node("a", "10.0.0.1"), node("b", "10.0.0.9", "10.0.0.1")], addresses, strict=True)))
    assert caught.value.faults[0].where.startswith("b ")


def test_a3_makes_version_1_2_with_the_super_pods_of_the_nodes_or_the_inventory() -> None:
    entries = [
        (node("a", "10.0.0.1"), [DeviceAddress(0, "192.1.0.1", "5", "0")]),
        (replace(node("b", "10.0.0.2"), super_pod="far"), [DeviceAddress(0, "192.1.0.2", "5", "0")]),
    ]
    table = build(entries, "a3")
    assert (table.version, check(table.render())) == ("1.2", [])
    assert table.super_pods == (SuperPod("0", ("10.0.0.1",)), SuperPod("far", ("10.0.0.2",)))
    assert build(entries, "910a").version == build(entries).version == "1.0"
    with pytest.raises(UsageError, match="levels"):
        build(entries, "a5")
    with pytest.raises(InputFaults, match="super-device id") as caught:
        build([(node("a", "10.0.0.1"), [DeviceAddress(0, "192.1.0.1")])], "a3")
    assert [one.where for one in caught.value.faults] == ["a", "a"]


def test_what_has_no_address_is_left_out_by_name_and_never_all_of_it() -> None:
    found = [(node("a", "10.0.0.1"), [DeviceAddress(1, "192.1.0.1")]), (node("b", "10.0.0.2"), [])]
    kept, words = complete(found, None)
    assert [one.name for one, _ in kept] == ["a"]
    assert words == ["a: no address: device 0", "b: no device has an address"]
    with pytest.raises(InputFaults, match="b: no device"):
        complete(found[1:], None)


def test_the_text_is_what_json_would_write() -> None:
    extras = {"a": {"b": [1, None, "x\ny"]}, "é": []}
    for table in (one_server(1, 3, "1.2"), one_server(1), ranks_2_0(2, 1)):
        server = replace(table.servers[0], extras=extras)
        devices = (replace(server.devices[0], extras=extras), *server.devices[1:])
        odd = replace(table, servers=(replace(server, devices=devices), *table.servers[1:]), extras=extras)
        for one in (table, odd):
            assert one.render() == json.dumps(one.as_json(), indent=4) + "\n"


def test_no_nodes_make_no_table() -> None:
    with pytest.raises(InputFaults, match="no nodes"):
        build([])


# -- merging


def test_the_order_of_arguments_gives_the_ranks() -> None:
    first = [server.server_id for server, _ in whole(2, 1).by_rank()]
    assert first == ["10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.1"]


def test_merge_sorts_by_address_or_name_when_asked() -> None:
    tables = [(str(number), one_server(number)) for number in (10, 9, 100)]
    assert [name for name, _ in in_order(tables, "given")] == ["10", "9", "100"]
    assert [name for name, _ in in_order(tables, "address")] == ["9", "10", "100"]
    named = [
        (name, RankTable((Server(name, one_server(1).servers[0].devices),))) for name in ("node10", "node9")
    ]
    assert [name for name, _ in in_order(named, "name")] == ["node9", "node10"]
    with pytest.raises(UsageError, match="order"):
        in_order(tables, "adress")


@pytest.mark.parametrize(
    ("second", "pointer", "word"),
    [
        (one_server(1), "/server_list/0/server_id", "server 10.0.0.1"),
        (
            RankTable((Server("10.0.0.9", (Device(0, "192.2.0.1", 0),)),)),
            "/server_list/0/device/0/device_ip",
            "address 192.2.0.1",
        ),
        (one_server(2, version="1.2"), "/version", "version 1.2"),
    ],
)
def test_what_can_not_be_one_table_is_refused_with_file_and_pointer(
    second: RankTable, pointer: str, word: str
) -> None:
    with pytest.raises(InputFaults) as caught:
        merge([("a.json", one_server(1)), ("b.json", second)])
    fault = caught.value.faults[0]
    assert fault.where == f"b.json {pointer}" and word in fault.what


def test_a_super_device_id_twice_in_one_super_pod_is_refused() -> None:
    second = one_server(2, version="1.2")
    device = replace(second.servers[0].devices[0], super_device_id="1000")
    second = replace(second, servers=(replace(second.servers[0], devices=(device,)),))
    with pytest.raises(InputFaults, match="super-device id 1000"):
        merge([("a.json", one_server(1, version="1.2")), ("b.json", second)])


def test_addresses_that_one_server_could_do_without_are_asked_for_in_the_merged_table() -> None:
    bare = RankTable((Server("10.0.0.2", (Device(0, "", 0),)),))
    with pytest.raises(InputFaults) as caught:
        merge([("a.json", one_server(1)), ("b.json", bare)])
    assert caught.value.faults[0].where.startswith("b.json ")


def test_unequal_device_counts_are_refused_for_910a_only() -> None:
    tables = [("a.json", one_server(1, 2)), ("b.json", one_server(2, 1))]
    assert merge(tables, "a2").ranks == 3
    with pytest.raises(InputFaults, match="910a needs as many"):
        merge(tables, "910a")


def test_a_table_whose_ranks_run_across_servers_keeps_the_order_of_its_servers() -> None:
    crossed = RankTable(
        (
            Server("b", (Device(0, "192.1.0.2", 1), Device(1, "192.2.0.2", 3))),
            Server("a", (Device(0, "192.1.0.1", 2), Device(1, "192.2.0.1", 0))),
        )
    )
    merged = merge([("x.json", crossed)])
    assert [(server.server_id, device.device_id) for server, device in merged.by_rank()] == [
        ("a", 1), ("a", 0), ("b", 0), ("b", 1),
    ]  # fmt: skip


# -- cutting and comparing


def test_a_range_of_ranks_is_half_open() -> None:
    assert parse_ranks("[8,16)") == range(8, 16)
    with pytest.raises(UsageError) as caught:
        parse_ranks("[0,4]")
    assert "[0,4)" in caught.value.hint and "[0,5)" in caught.value.hint
    for text in ("[4,4)", "4", "[0,4", "[-1,4)", "[0,٤)"):
        with pytest.raises(UsageError, match=r"is not a range of ranks|is empty"):
            parse_ranks(text)


def test_a_slice_by_ranks_is_renumbered() -> None:
    part = slice_table(whole(1, 2, 3), ranks=range(1, 5))
    assert [(server.server_id, device.device_id, device.rank_id) for server, device in part.by_rank()] == [
        ("10.0.0.1", 1, 0), ("10.0.0.2", 0, 1), ("10.0.0.2", 1, 2), ("10.0.0.3", 0, 3),
    ]  # fmt: skip


def test_a_dropped_server_leaves_its_super_pod_too() -> None:
    table = merge([(str(number), one_server(number, version="1.2")) for number in (1, 2)])
    part = slice_table(table, drop=["10.0.0.1"])
    assert part.super_pods == (SuperPod("0", ("10.0.0.2",)),)
    two_pods = replace(table, super_pods=(SuperPod("0", ("10.0.0.1",)), SuperPod("1", ("10.0.0.2",))))
    assert slice_table(two_pods, drop=["10.0.0.1"]).super_pods == (SuperPod("1", ("10.0.0.2",)),)


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        ({"servers": ["10.0.0.7"]}, "no server '10.0.0.7' in the table"),
        ({"ranks": range(0, 9)}, r"the ranks \[0,9\) of a table with \[0,2\)"),
        ({"drop": ["10.0.0.1"]}, "nothing of the table is left"),
    ],
)
def test_a_slice_of_what_is_not_there_is_refused(ask: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        slice_table(whole(1), **ask)  # type: ignore[arg-type]


def test_a_difference_names_the_rank_and_both_sides() -> None:
    left, right = whole(1, 2), whole(1, 3)
    assert diff(left, left) == []
    assert [one.rank for one in diff(left, right)] == [2, 3]
    assert "10.0.0.2" in diff(left, right)[0].left and "10.0.0.3" in diff(left, right)[0].right
    assert diff(left, whole(1))[0].right == ""


def test_1_2_becomes_1_0_and_the_way_back_is_refused_in_words() -> None:
    table = one_server(1, version="1.2")
    assert to_version(table, "1.0") == one_server(1)
    with pytest.raises(UsageError, match="super-device"):
        to_version(one_server(1), "1.2")


# -- files


def test_files_are_named_as_the_vendors_tools_named_them() -> None:
    assert file_name(one_server(1, 8)) == "hccl_8p_01234567_10.0.0.1.json"
    assert file_name(one_server(1, 16)) == "hccl_16p_0123456789101112131415_10.0.0.1.json"
    assert file_name(whole(1, 2, 3, 4, devices=8)) == "hccl_4s_32p.json"
    assert "/" not in file_name(RankTable((Server("../../etc", one_server(1).servers[0].devices),)))


def test_another_file_of_that_name_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "hccl_2s_4p.json"
    assert save(whole(1, 2), path)
    assert not save(whole(1, 2), path)
    with pytest.raises(UsageError, match="another file"):
        save(whole(3, 4), path)
    assert load(path) == whole(1, 2)
    assert save(whole(3, 4), path, force=True)
    assert load(path) == whole(3, 4)
    assert [one.name for one in tmp_path.iterdir()] == ["hccl_2s_4p.json"]


def test_a_name_that_hccl_refuses_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.json"):
        save(whole(1), tmp_path / "table.txt")
    assert not list(tmp_path.iterdir())


# -- the example tables


def example_parts() -> list[RankTable]:
    """Four servers of eight devices: device d of server s is 192.{d%4+1}.27.{6+2s+d//4}."""
    parts = []
    for place in range(4):
        address = f"10.155.111.{140 + place}"
        devices = [DeviceAddress(one, f"192.{one % 4 + 1}.27.{6 + 2 * place + one // 4}") for one in range(8)]
        parts.append(build([(node(f"node{place + 1}", address), devices)]))
    return parts


def test_the_example_tables_are_what_the_tool_writes() -> None:
    parts = example_parts()
    merged = merge([(file_name(part), part) for part in parts])
    made = {file_name(table): table.render() for table in [*parts, merged]}
    assert {path.name: path.read_text() for path in EXAMPLES.glob("*.json")} == made
    assert len(made) == 5 and merged.ranks == 32 and "hccl_4s_32p.json" in made


def test_the_example_parts_merge_in_their_files_order() -> None:
    parts = load_all(sorted(EXAMPLES.glob("hccl_8p_*.json")))
    assert merge(parts) == load(EXAMPLES / "hccl_4s_32p.json")


def test_renumbering_is_idempotent() -> None:
    table = whole(1, 2)
    assert renumbered(table.servers) == table.servers


def test_unequal_counts_of_a_merge_name_both_files() -> None:
    with pytest.raises(InputFaults) as caught:
        merge([("a.json", one_server(1, 2)), ("b.json", one_server(2, 3))], "910a")
    (fault,) = caught.value.faults
    assert fault.where == "b.json /server_list/0/device"
    assert fault.what.startswith("3 devices, and a.json /server_list/0 has 2")


def test_the_examples_in_the_documentation_of_the_library_work() -> None:
    failed, tried = doctest.testmod(api)
    assert failed == 0 and tried > 10
