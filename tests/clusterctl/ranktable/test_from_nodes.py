"""Build one table from the answers of the nodes; nodes of two kinds are refused."""

from __future__ import annotations

import pytest

from clusterctl.errors import InputFaults, UsageError, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
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


def test_a5_is_refused_since_no_answer_tells_its_networks() -> None:
    with pytest.raises(UsageError, match="levels") as caught:
        asked((f"{HEAD}0\t0\t0\tAscend950PR\n", A5))
    assert "--from plan.yaml" in caught.value.hint and "rank_table: never" in caught.value.hint


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
