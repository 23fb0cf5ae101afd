"""Build one table from the answers of the nodes; nodes of two kinds are refused."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from clusterctl.errors import InputFaults, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.ranktable.check import check
from clusterctl.ranktable.from_nodes import BuiltTable, build_from_nodes
from clusterctl.transport.connection import Completed
from clusterctl.transport.fanout import Connections
from tests.support.scripted import ScriptedTransport

HEAD = "NPU ID\tChip ID\tChip Logic ID\tChip Name\n"
ONE_CHIP = f"{HEAD}0\t0\t0\tAscend 910\n1\t0\t1\tAscend 910\n"
TWO_CHIPS = f"{HEAD}0\t0\t0\tAscend910\n0\t1\t1\tAscend910\n0\t2\t-\tMcu\n"
A2 = "NPU ID : 0\nChip Type : Ascend\nChip Name : 910B4\n"
A3 = "    NPU ID            : 0\n    NPU Name          : 9392\n    Chip Name         : Ascend910\n"
A5 = "NPU Name : 9599\nChip Name : Ascend950PR\n"
ABSENT = Completed(127, stderr=b"not found")


def said(text: str) -> Completed:
    return Completed(0, stdout=text.encode())


def node_says(number: int, chips: str, board: str | None) -> dict[tuple[str, str], Completed]:
    """Return all answers of one node with two devices."""
    name = f"node{number}"
    script = {(name, "npu-smi info -m"): said(chips)}
    for device in (0, 1):
        script[name, f"hccn_tool -i {device} -ip -g"] = said(f"ipaddr:192.168.{device}.{number}\n")
        script[name, f"hccn_tool -i {device} -vnic -g"] = said(f"ipaddr:192.168.11{device}.{number}\n")
    for card, chip, device in ((0, 0, 0), (0, 1, 1), (1, 0, 1)):
        place = f"-i {card} -c {chip}"
        super_pod = said(f"SDID : {100 * number + device}\nSuper Pod ID : 4\n")
        script[name, f"npu-smi info -t spod-info {place}"] = super_pod
        if board is not None:
            script[name, f"npu-smi info -t board {place}"] = said(board)
    return script


def cluster(count: int) -> Cluster:
    return Cluster(
        "lab",
        tuple(
            Node(
                f"node{n}", f"10.0.0.{n}", f"10.0.0.{n}", devices=(0, 1), kind="npu", server_id=f"10.0.0.{n}"
            )
            for n in range(1, count + 1)
        ),
    )


def asked(*nodes: tuple[str, str | None], hardware: str | None = None) -> tuple[BuiltTable, list[str]]:
    """Return the table of nodes with these chips and boards, and the commands that ran on the first node."""
    script = {("*", "run"): ABSENT}
    for number, (chips, board) in enumerate(nodes, start=1):
        script |= node_says(number, chips, board)
    transport = ScriptedTransport(script)
    with Connections(transport) as connections:
        made = build_from_nodes(cluster(len(nodes)), connections, None, hardware)
    return made, [what for name, what, _ in transport.asked if name == "node1"]


def test_a3_nodes_are_told_by_their_boards_and_get_version_1_2() -> None:
    made, questions = asked((TWO_CHIPS, A3), (TWO_CHIPS, A3))
    assert (
        made.table.version == "1.2" and made.detected == "node[1-2] are a3 according to npu-smi: version 1.2"
    )
    assert [device.super_device_id for _, device in made.table.by_rank()] == ["100", "101", "200", "201"]
    assert made.table.by_rank()[0][1].device_ip == "192.168.110.1"
    assert questions.count("npu-smi info -m") == 1, "asked once, for the kind and for the super pod"


@pytest.mark.parametrize("board", [None, "NPU ID : 0\n"])
def test_two_chips_a_card_tell_an_a3_whose_board_says_nothing(board: str | None) -> None:
    assert asked((TWO_CHIPS, board))[0].table.version == "1.2"
    assert asked((ONE_CHIP, board))[0].table.version == "1.0"


def test_a2_nodes_and_nodes_without_npu_smi_get_version_1_0_in_silence() -> None:
    for board in (A2, "NPU Name : 7\nChip Name : 910A\n"):
        made, _ = asked((ONE_CHIP, board), ("", None))
        assert (made.table.version, made.detected) == ("1.0", "")
    made, questions = asked((f"{HEAD}0\t0\t0\t910B3\n", None))
    assert made.table.version == "1.0" and "npu-smi info -t board -i 0 -c 0" not in questions


def test_a_table_of_two_kinds_is_refused_with_the_nodes_of_each() -> None:
    with pytest.raises(InputFaults) as caught:
        asked((TWO_CHIPS, A3), (ONE_CHIP, A2), (TWO_CHIPS, A3), ("", None))
    found = {fault.where: fault.what for fault in caught.value.faults}
    assert found == {
        "node[1,3]": "a3: needs version 1.2",
        "node2": "a2: needs version 1.0",
        "node4": "unknown hardware: needs version 1.0",
    }
    assert "--for a2" in caught.value.hint


def test_what_someone_says_goes_before_what_the_nodes_say_and_is_not_asked_for() -> None:
    made, questions = asked((TWO_CHIPS, A3), (ONE_CHIP, A2), hardware="a2")
    assert made.table.version == "1.0" and not any("npu-smi" in one for one in questions)
    assert asked((ONE_CHIP, A2), hardware="a3")[0].table.version == "1.2"


A5_CHIPS = f"{HEAD}0\t0\t0\tAscend950PR\n1\t0\t1\tAscend950PR\n"
FILE = "cat /etc/hccl_rootinfo.json"


def root_info(node: int, devices: tuple[int, ...] = (0, 1), **changes: Any) -> str:
    """Return the file of a node, with networks in two layers for each device."""

    def level(layer: int, network: str, device: int) -> dict[str, Any]:
        address = {"addr_type": "IPV4", "addr": f"10.{layer}.{node}.{device}", "ports": ["0/0", "0/1"]}
        return {
            **{"net_layer": layer, "net_instance_id": network, "net_type": "CLOS", "net_attr": ""},
            "rank_addr_list": [address],
        }

    ranks = [
        {
            **{"device_id": device, "local_id": device, "device_port": 16666},
            "level_list": [level(0, f"rack-{node}", device), level(3, "cluster", device)],
        }
        for device in devices
    ]
    head = {"version": "2.0", "topo_file_path": "/usr/local/Ascend/driver/topo/a.json"}
    return json.dumps({**head, "rank_count": len(ranks), "rank_list": ranks, **changes})


def a5(*files: str | None, **options: Any) -> BuiltTable:
    script: dict[tuple[str, str], Completed] = {("*", "run"): ABSENT}
    for number, text in enumerate(files, start=1):
        script |= node_says(number, A5_CHIPS, A5)
        if text is not None:
            script[f"node{number}", FILE] = said(text)
    with Connections(ScriptedTransport(script)) as connections:
        return build_from_nodes(cluster(len(files)), connections, **options)


def test_a_table_of_a5_nodes_is_built_from_their_own_files() -> None:
    built = a5(root_info(1), root_info(2))
    assert built.table.version == "2.0" and "node[1-2] are a5" in built.detected
    value = built.table.as_json()
    assert not check(json.dumps(value))
    ranks = cast("list[dict[str, Any]]", value["rank_list"])
    assert [(rank["rank_id"], rank["local_id"], rank["device_id"]) for rank in ranks] == [
        (0, 0, 0), (1, 1, 1), (2, 0, 0), (3, 1, 1)
    ]  # fmt: skip
    assert ranks[3]["level_list"] == json.loads(root_info(2))["rank_list"][1]["level_list"]
    # HCCL copies every key of an entry.
    assert all(rank["device_port"] == 16666 for rank in ranks)
    assert a5(root_info(1), which=[1]).table.ranks == 1


def test_an_a5_node_without_its_file_or_a_device_is_named() -> None:
    with pytest.raises(WorkFailed, match=r"node2: no /etc/hccl_rootinfo\.json") as caught:
        a5(root_info(1), None)
    assert "--from plan.yaml" in caught.value.hint and "rank_table: never" in caught.value.hint
    with pytest.raises(WorkFailed, match=r"node1: .* no entry for device 1"):
        a5(root_info(1, (0,)))
    built = a5(root_info(1, (0,)), skip_incomplete=True)
    assert built.table.ranks == 1 and built.left_out == ("node1: not in /etc/hccl_rootinfo.json: device 1",)
    for wrong in ("[]", "{", '{"version": "1.0", "rank_list": []}'):
        with pytest.raises(WorkFailed, match="node1: /etc/hccl_rootinfo"):
            a5(wrong)
    with pytest.raises(InputFaults, match="node2 device 0"):
        a5(root_info(1), root_info(2).replace('"10.3.2.0"', '"nonsense"'))


def test_an_a3_device_outside_of_a_super_pod_is_named() -> None:
    script = {("*", "run"): ABSENT, **node_says(1, TWO_CHIPS, A3)}
    script["node1", "npu-smi info -t spod-info -i 0 -c 1"] = said("not supported\n")
    with (
        Connections(ScriptedTransport(script)) as connections,
        pytest.raises(WorkFailed, match="node1: device 1"),
    ):
        build_from_nodes(cluster(1), connections)


def test_an_address_that_hccn_tool_did_not_tell_is_said_to_be_another_ones() -> None:
    script = {("*", "run"): ABSENT, **node_says(1, ONE_CHIP, A2), **node_says(2, ONE_CHIP, A2)}
    script["node2", "hccn_tool -i 1 -ip -g"] = Completed(0)
    script["node2", "cat /etc/hccn.conf"] = said("address_1=192.168.1.2\n")
    with Connections(ScriptedTransport(script)) as connections:
        made = build_from_nodes(cluster(2), connections)
    assert made.other_sources == (
        "node2: some addresses are from hccn.conf; hccn_tool has none for these devices",
    )
    assert made.table.by_rank()[3][1].device_ip == "192.168.1.2"
