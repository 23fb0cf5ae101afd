"""The make-believe devices answer byte for byte as real tools do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterctl.sandbox import devices as sandbox_devices

DEVICES = 8


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    # a quote and blanks: paths are quoted in the scripts.
    folder = tmp_path / "a node's folder"
    folder.mkdir()
    conf, answers = folder / "hccn.conf", folder / "answers"
    conf.write_text(sandbox_devices.hccn_conf(1, DEVICES))
    answers.write_text(sandbox_devices.answers(1, DEVICES))
    (folder / "hccn_tool").write_text(sandbox_devices.hccn_tool(str(conf), str(answers), DEVICES))
    (folder / "npu-smi").write_text(sandbox_devices.npu_smi(1, DEVICES, str(answers)))
    return folder


def ask(tools: Path, words: str) -> tuple[int, str]:
    tool, *arguments = words.split()
    done = subprocess.run(["sh", str(tools / tool), *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("hccn_tool -i 0 -ip -g", "ipaddr:192.168.10.1\nnetmask:255.255.255.0\n"),
        ("hccn_tool -i 3 -ip -g", "ipaddr:192.168.40.1\nnetmask:255.255.255.0\n"),
        ("hccn_tool -i 4 -ip -g", "ipaddr:192.168.10.2\nnetmask:255.255.255.0\n"),
        ("hccn_tool -g -ip -i 0", "ipaddr:192.168.10.1\nnetmask:255.255.255.0\n"),
        ("hccn_tool -i 0 -ip -inet6 -g", "ipv6_address:fd00::1:0\nprefix_length:64\n"),
        ("hccn_tool -i 0 -link -g", "link status: UP\n"),
        ("hccn_tool -i 0 -net_health -g", "net health status: Success\n"),
        ("hccn_tool -i 1 -vnic -g", "ipaddr:192.168.120.1\nnetmask:255.255.255.0\n"),
        ("hccn_tool -i 0 -speed -g", "Speed: 100000 Mb/s\n"),
        ("npu-smi info -i 0 -c 0 -t health", "Health Status : OK\n"),
        ("npu-smi info -l", "Total Count : 8\n"),
        ("npu-smi info -t spod-info -i 1 -c 0", "SDID : 37748737\nSuper Pod ID : 0\nServer Index : 0\n"),
    ],
)
def test_an_answer_has_the_real_tool_s_format(tools: Path, words: str, answer: str) -> None:
    assert ask(tools, words) == (0, answer)


def test_the_device_map_is_separated_by_tabs(tools: Path) -> None:
    code, text = ask(tools, "npu-smi info -m")
    assert code == 0
    assert text.splitlines()[:2] == ["NPU ID\tChip ID\tChip Logic ID\tChip Name", "0\t0\t0\tAscend 910"]
    assert len(text.splitlines()) == 1 + DEVICES


def test_the_board_tells_a2_from_a3(tools: Path) -> None:
    question = "npu-smi info -t board -i 1 -c 0"
    assert ask(tools, question) == (0, "NPU ID : 1\nChip Type : Ascend\nChip Name : 910B3\n")
    with (tools / "answers").open("a") as file:
        file.write("npu_name=9392\nsdid_1=7\n")
    assert ask(tools, question) == (0, "NPU ID : 1\nNPU Name : 9392\nChip Name : Ascend910\n")
    assert ask(tools, "npu-smi info -t spod-info -i 1 -c 0")[1].startswith("SDID : 7\n")


def test_a_device_without_an_address_prints_nothing(tools: Path) -> None:
    conf = tools / "hccn.conf"
    lines = [line for line in conf.read_text().splitlines() if not line.endswith("_2") and "_2=" not in line]
    conf.write_text("\n".join(lines) + "\n")
    assert ask(tools, "hccn_tool -i 2 -ip -g") == (0, "")
    # And not device 1's line.
    assert ask(tools, "hccn_tool -i 12 -ip -g")[0] == 1


@pytest.mark.parametrize(
    "words",
    [
        "hccn_tool -i 8 -ip -g",
        "hccn_tool -ip -g",
        "hccn_tool -i x -ip -g",
        "hccn_tool -i",
        "hccn_tool -i 0 -ip",
        "hccn_tool -i 0 -ip -s address 1.2.3.4",
        "hccn_tool -i 0 -nonsense -g",
        "npu-smi info -t health -i 8",
        "npu-smi top",
    ],
)
def test_a_question_without_an_answer_is_refused(tools: Path, words: str) -> None:
    code, text = ask(tools, words)
    assert (code, text) == (1, "")


def test_a_fault_can_be_played(tools: Path) -> None:
    answers = tools / "answers"
    answers.write_text(answers.read_text().replace("link_0=UP", "link_0=DOWN"))
    assert ask(tools, "hccn_tool -i 0 -link -g") == (0, "link status: DOWN\n")
    assert ask(tools, "hccn_tool -i 1 -link -g") == (0, "link status: UP\n")


def test_hccn_conf_has_the_real_file_s_lines() -> None:
    assert sandbox_devices.hccn_conf(2, 2) == (
        "address_0=192.168.10.2\nnetmask_0=255.255.255.0\naddress_1=192.168.20.2\nnetmask_1=255.255.255.0\n"
    )


def test_no_two_devices_of_the_largest_sandbox_share_an_address() -> None:
    from clusterctl.sandbox.layout import MAX_NODES

    largest = sandbox_devices.MAX_DEVICES
    for devices in (1, 2, 8, largest):
        every = [
            sandbox_devices.device_address(node, device, devices)
            for node in range(1, MAX_NODES + 1)
            for device in range(devices)
        ]
        assert len(set(every)) == len(every)
        assert all(0 < int(address.rpartition(".")[2]) < 255 for address in every)
