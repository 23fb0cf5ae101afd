from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.errors import WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.ranktable.devices import (
    VENDOR_TOOL,
    parse_address,
    parse_chips,
    parse_conf,
    parse_fields,
    read_addresses,
)
from clusterctl.ranktable.table import DeviceAddress
from clusterctl.transport.connection import Completed
from tests.support.scripted import ScriptedTransport

NODE = Node("node1", host="10.0.0.1", address="10.0.0.1", devices=(0, 1), kind="npu")
ABSENT = Completed(127, stderr=b"not found")
SILENT = Completed(0)


def said(text: str) -> Completed:
    return Completed(0, stdout=text.encode())


def address(text: str) -> Completed:
    return said(f"ipaddr:{text}\nnetmask:255.255.255.0\n")


def asked(answers: dict[str, Completed], node: Node = NODE) -> tuple[list[DeviceAddress], list[str]]:
    """Return the addresses and the commands that ran; a program that the script does not name does not exist."""
    transport = ScriptedTransport(
        {("*", "run"): ABSENT, **{("node1", what): one for what, one in answers.items()}}
    )
    found = read_addresses(transport.connect(node), node)
    return found, [what for _, what, _ in transport.asked]


def test_hccn_tool_on_the_path_is_asked_device_by_device() -> None:
    found, questions = asked(
        {
            "hccn_tool -i 0 -ip -g": address("192.168.10.1"),
            "hccn_tool -i 1 -ip -g": address("192.168.20.1"),
        }
    )
    assert found == [DeviceAddress(0, "192.168.10.1"), DeviceAddress(1, "192.168.20.1")]
    assert questions == ["hccn_tool -i 0 -ip -g", "hccn_tool -i 1 -ip -g"]


def test_the_vendors_place_is_tried_where_the_path_has_no_tool() -> None:
    found, questions = asked(
        {
            f"{VENDOR_TOOL} -i 0 -ip -g": address("192.168.10.1"),
            f"{VENDOR_TOOL} -i 1 -ip -g": address("192.168.20.1"),
        }
    )
    assert [one.ip for one in found] == ["192.168.10.1", "192.168.20.1"]
    assert questions.count("hccn_tool -i 0 -ip -g") == 1 and len(questions) == 3


def test_the_inventorys_tool_is_the_only_one_asked() -> None:
    node = replace(NODE, hccn_tool="/opt/hccn_tool", devices=(3,))
    found, questions = asked({"/opt/hccn_tool -i 3 -ip -g": address("192.168.40.1")}, node)
    assert found == [DeviceAddress(3, "192.168.40.1")] and questions == ["/opt/hccn_tool -i 3 -ip -g"]


def test_a_device_that_answers_with_silence_is_asked_for_ipv6() -> None:
    found, _ = asked(
        {
            "hccn_tool -i 0 -ip -g": SILENT,
            "hccn_tool -i 0 -ip -inet6 -g": said("ipv6_address:2001:0db8::1\nprefix_length:64\n"),
            "hccn_tool -i 1 -ip -g": SILENT,
            "hccn_tool -i 1 -ip -inet6 -g": said("ipv6_address:2001:0db8::2\nprefix_length:64\n"),
        }
    )
    assert [one.ip for one in found] == ["2001:0db8::1", "2001:0db8::2"]


def test_hccn_conf_serves_where_there_is_no_tool() -> None:
    text = (
        "address_0=192.168.10.1\nnetmask_0=255.255.255.0\ngateway_0=192.168.10.254\naddress_1=192.168.20.1\n"
    )
    found, _ = asked({"cat /etc/hccn.conf": said(text)})
    assert [one.ip for one in found] == ["192.168.10.1", "192.168.20.1"]
    node = replace(NODE, hccn_conf="/home/me/hccn.conf")
    assert asked({"cat /home/me/hccn.conf": said(text)}, node)[0] == found


def test_the_tools_answer_goes_before_hccn_conf() -> None:
    found, _ = asked(
        {
            "hccn_tool -i 0 -ip -g": address("192.168.10.9"),
            "hccn_tool -i 1 -ip -g": SILENT,
            "cat /etc/hccn.conf": said("address_0=192.168.10.1\naddress_1=192.168.20.1\n"),
        }
    )
    assert [(one.ip, one.source) for one in found] == [("192.168.10.9", ""), ("192.168.20.1", "hccn.conf")]


def test_the_inventorys_addresses_serve_last_and_by_device() -> None:
    node = replace(NODE, devices=(4, 5), device_ips=("192.168.10.4", "192.168.10.5"))
    assert asked({}, node)[0] == [DeviceAddress(4, "192.168.10.4"), DeviceAddress(5, "192.168.10.5")]
    transport = ScriptedTransport({("*", "run"): ABSENT})
    assert read_addresses(transport.connect(node), node, [5]) == [DeviceAddress(5, "192.168.10.5")]


def test_the_order_of_the_devices_asked_for_is_kept() -> None:
    transport = ScriptedTransport(
        {
            ("*", "hccn_tool -i 1 -ip -g"): address("192.168.20.1"),
            ("*", "hccn_tool -i 0 -ip -g"): address("192.168.10.1"),
        }
    )
    assert [one.device_id for one in read_addresses(transport.connect(NODE), NODE, [1, 0])] == [1, 0]


def test_one_device_without_an_address_refuses_and_names_device_and_node() -> None:
    with pytest.raises(WorkFailed) as caught:
        asked({"hccn_tool -i 0 -ip -g": address("192.168.10.1"), "hccn_tool -i 1 -ip -g": SILENT})
    assert caught.value.message.startswith("node1: device 1 without an address")
    assert "hccn_tool -i 1" in caught.value.hint and "device_ips" in caught.value.hint


def test_the_devices_of_a_single_node_need_no_addresses() -> None:
    transport = ScriptedTransport({("*", "run"): ABSENT})
    found = read_addresses(transport.connect(NODE), NODE, alone=True)
    assert found == [DeviceAddress(device, "") for device in NODE.devices]


def test_ipv6_is_not_asked_for_where_one_device_has_ipv4() -> None:
    with pytest.raises(WorkFailed, match="device 1"):
        asked(
            {
                "hccn_tool -i 0 -ip -g": address("192.168.10.1"),
                "hccn_tool -i 1 -ip -g": SILENT,
                "hccn_tool -i 1 -ip -inet6 -g": said("ipv6_address:2001:0db8::2\nprefix_length:64\n"),
            }
        )


def test_a_driver_in_trouble_is_quoted() -> None:
    with pytest.raises(WorkFailed, match="ended with 1: driver not loaded"):
        asked({"run": Completed(1, stderr=b"driver not loaded\n")})
    with pytest.raises(WorkFailed, match="did not end within 20 s"):
        asked({"run": Completed(None, signal=15, timed_out=True)})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ipaddr:192.161.200.10\nnetmask:255.255.255.0\n", "192.161.200.10"),
        ("ipv6_address:2001:0db8::1\nprefix_length:64\n", "2001:0db8::1"),
        ("ipaddr: 192.168.1.1 \r\n", "192.168.1.1"),
        ("", None),
        ("netmask:255.255.255.0\n", None),
        ("ipaddr:192.168.1.300\n", None),
        ("dcmi model initialized failed, because the device is used. ret is -8020\n", None),
    ],
)
def test_what_hccn_tool_prints_is_read(text: str, found: str | None) -> None:
    assert parse_address(text) == found


def test_hccn_conf_keeps_its_other_keys_to_itself() -> None:
    text = "# by hand\naddress_0=192.168.1.1\nnetdetect_0=192.168.1.2\naddress_11=10.0.0.1\naddress_1=\n"
    assert parse_conf(text) == {0: "192.168.1.1", 11: "10.0.0.1"}


# -- A3: super pods

MAPPING = """NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
0                              0                              0                              Ascend910
0                              1                              1                              Ascend910
0                              2                              -                              Mcu
"""
SUPER_POD = (
    "        SDID                           : {}\n        Super Pod Size : 384\n        Super Pod ID : 7\n"
)


def asked_a3(answers: dict[str, Completed], skip: bool = False) -> list[DeviceAddress]:
    script = {("*", "run"): ABSENT, **{("node1", what): one for what, one in answers.items()}}
    return read_addresses(ScriptedTransport(script).connect(NODE), NODE, (1, 0), "a3", skip)


A3 = {
    "hccn_tool -i 0 -vnic -g": address("192.168.110.1"),
    "hccn_tool -i 1 -vnic -g": address("192.168.120.1"),
    "npu-smi info -m": said(MAPPING),
    "npu-smi info -t spod-info -i 0 -c 0": said(SUPER_POD.format(37748736)),
    "npu-smi info -t spod-info -i 0 -c 1": said(SUPER_POD.format(37748737)),
}


def test_on_a3_each_device_is_asked_for_its_super_device_id_by_card_and_chip() -> None:
    assert asked_a3(A3) == [
        DeviceAddress(1, "192.168.120.1", "37748737", "7"),
        DeviceAddress(0, "192.168.110.1", "37748736", "7"),
    ]


@pytest.mark.parametrize(
    ("left_out", "word"),
    [
        ("npu-smi info -m", "npu-smi, which shows the super-device ids of a3, is missing"),
        ("npu-smi info -t spod-info -i 0 -c 1", "device 1 has no super-device id"),
        ("hccn_tool -i 1 -vnic -g", "devices 1, 0 without an address"),
    ],
)
def test_what_a3_does_not_tell_is_named(left_out: str, word: str) -> None:
    with pytest.raises(WorkFailed, match=f"node1: {word}"):
        asked_a3({what: answer for what, answer in A3.items() if what != left_out})


def test_a_device_without_an_address_can_be_left_out() -> None:
    answers = {what: answer for what, answer in A3.items() if what != "hccn_tool -i 1 -vnic -g"}
    assert [one.device_id for one in asked_a3({**answers, "hccn_tool -i 1 -vnic -g": SILENT}, skip=True)] == [
        0
    ]


def test_npu_smis_tables_are_read() -> None:
    assert parse_chips(MAPPING) == {0: (0, 0), 1: (0, 1)}
    assert parse_chips("NPU ID\tChip ID\tChip Logic ID\tChip Name\n4\t0\t9\tAscend 910\n") == {9: (4, 0)}
    for odd in ("²", "٣", "9" * 5000, "-"):
        assert parse_chips(f"NPU ID\tChip ID\tChip Logic ID\n0\t0\t{odd}\n") == {}
    assert parse_chips("") == {} == parse_chips("something else\n")
    assert parse_fields(SUPER_POD.format(5)) == {"sdid": "5", "super pod size": "384", "super pod id": "7"}
