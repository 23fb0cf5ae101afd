"""What nodes say about their devices, and `--kind` for files that do not tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.checks import kinds
from clusterctl.checks.kinds import ReportedDevices
from clusterctl.cli import kind_option, options
from clusterctl.errors import Unreachable, UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.transport.fanout import Connections
from tests.support.scripted import ScriptedTransport

MISSING = None
NPU = """NPU ID    Chip ID   Chip Logic ID   Chip Phy-ID   Chip Name
0         0         0               0             Ascend 910B3
0         1         -               -             Mcu
1         0         1               1             Ascend 910B3
"""


def output(text: str, code: int = 0) -> dict[str, Any]:
    return {"exit_code": code, "out": text, "err": "", "timed_out": False}


def asked(npu: Any, cuda: Any) -> ReportedDevices:
    script = ScriptedTransport({("a", "examine"): {"commands": {"npu": npu, "cuda": cuda}}})
    with Connections(script) as connections:
        (outcome,) = kinds.ask_devices([Node("a", "a", "a")], connections)
    return outcome.get()


def test_the_tools_of_the_drivers_tell_the_kind_and_the_devices() -> None:
    assert asked(output(NPU), MISSING) == ReportedDevices("npu", (0, 1), "Ascend 910B3")
    gpus = output("0, NVIDIA H100\n1, NVIDIA H100\n")
    assert asked(MISSING, gpus) == ReportedDevices("cuda", (0, 1), "NVIDIA H100")
    assert asked(MISSING, MISSING).text() == "0 cpu"
    # A driver that is installed and does not work names no device.
    assert asked(output("dcmi module initialize failed", 1), output("couldn't communicate", 9)).kind == "cpu"


def test_devices_that_a_hostfile_does_not_tell_are_a_warning() -> None:
    nodes = (Node("a", "a", "a"), Node("b", "b", "b"), Node("c", "c", "c"))
    script = ScriptedTransport(
        {
            ("a", "examine"): {"commands": {"npu": output(NPU), "cuda": MISSING}},
            ("b", "examine"): {"commands": {"npu": MISSING, "cuda": MISSING}},
            ("c", "connect"): Unreachable("c", "no answer", "look"),
        }
    )
    with Connections(script) as connections:
        assert kinds.unexpected(Cluster("lab", nodes, source="hostfile"), connections) == []
        (found,) = kinds.unexpected(Cluster("lab", nodes, source="hostfile", assumed=True), connections)
    assert (found.level, found.where) == ("warning", "a")
    assert "2 npu (Ascend 910B3)" in found.what and "--kind npu" in found.remedy


def test_kind_is_an_option_of_files_that_do_not_tell_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("10.0.0.1 slots=2\n")
    (tmp_path / "cluster.yaml").write_text("nodes: {a: {kind: npu, devices: 2}}\n")
    assert options.cluster_of(tmp_path / "hosts").assumed
    assert not options.cluster_of(tmp_path / "cluster.yaml").assumed
    token = kind_option._CHOSEN.set("cuda")
    try:
        found = options.cluster_of(tmp_path / "hosts")
        assert found.nodes[0].kind == "cuda" and not found.assumed
        with pytest.raises(UsageError, match="has the kind of its nodes"):
            options.cluster_of(tmp_path / "cluster.yaml")
    finally:
        kind_option._CHOSEN.reset(token)
