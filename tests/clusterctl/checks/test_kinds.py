"""What nodes say about their devices, and `--kind` for files that do not tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.checks import kinds
from clusterctl.checks.kinds import ReportedDevices
from clusterctl.cli import choices
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
    assert choices.cluster_of(tmp_path / "hosts").assumed
    assert not choices.cluster_of(tmp_path / "cluster.yaml").assumed
    token = choices.KIND.set("cuda")
    try:
        found = choices.cluster_of(tmp_path / "hosts")
        assert found.nodes[0].kind == "cuda" and not found.assumed
        with pytest.raises(UsageError, match="has the kind of its nodes"):
            choices.cluster_of(tmp_path / "cluster.yaml")
    finally:
        choices.KIND.reset(token)


GPUS = output("0, NVIDIA H200\n1, NVIDIA H200\n")


def inventory(tmp_path: Path, text: str) -> Cluster:
    (tmp_path / "cluster.yaml").write_text(f"nodes: {{{text}}}\n")
    return choices.cluster_of(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("keys", "reports", "expected"),
    [
        ("", {"npu": MISSING, "cuda": GPUS}, ("cuda", (0, 1))),
        ("kind: cuda", {"npu": MISSING, "cuda": GPUS}, ("cuda", (0, 1))),
        ("", {"npu": output(NPU), "cuda": MISSING}, ("npu", (0, 1))),
        ("", {"npu": MISSING, "cuda": MISSING}, ("cpu", (0,))),
        ("devices: 3", None, ("cpu", (0, 1, 2))),
        ("kind: cuda, devices: 8", None, ("cuda", tuple(range(8)))),
        ("kind: cpu", None, ("cpu", (0,))),
    ],
)
def test_a_node_is_asked_for_what_the_inventory_does_not_name(
    tmp_path: Path, keys: str, reports: Any, expected: tuple[str, tuple[int, ...]]
) -> None:
    cluster = inventory(tmp_path, f"a: {{{keys}}}")
    script = ScriptedTransport({("a", "examine"): {"commands": reports}} if reports else {})
    with Connections(script) as connections:
        (node,) = kinds.completed(cluster, connections).nodes
    assert (node.kind, node.devices, node.is_asked) == (*expected, False)


def test_devices_without_a_kind_count_as_cpus_and_others_are_a_warning(tmp_path: Path) -> None:
    cluster = inventory(tmp_path, "a: {devices: 2}")
    script = ScriptedTransport({("a", "examine"): {"commands": {"npu": MISSING, "cuda": GPUS}}})
    with Connections(script) as connections:
        (found,) = kinds.unexpected(cluster, connections)
    assert found.level == "warning" and "2 cuda (NVIDIA H200)" in found.what
    assert "write `kind: cuda` into it" in found.remedy


@pytest.mark.parametrize(
    "reports", [{"npu": output(NPU), "cuda": MISSING}, {"npu": MISSING, "cuda": MISSING}]
)
def test_a_node_without_devices_of_its_kind_is_an_error_and_a_finding(tmp_path: Path, reports: Any) -> None:
    cluster = inventory(tmp_path, "a: {kind: cuda}, b: {kind: cuda, devices: 0}, c: {kind: cuda}")
    answers = {("a", "examine"): {"commands": reports}, ("c", "examine"): {"commands": {"cuda": GPUS}}}
    with Connections(ScriptedTransport(answers)) as connections:
        with pytest.raises(UsageError, match="a: the inventory says kind cuda and names no devices"):
            kinds.completed(cluster, connections)
        found, findings = kinds.checked(cluster, connections)
    assert [(entry.level, entry.where) for entry in findings] == [("bad", "a"), ("warning", "b"), ("ok", "c")]
    assert [node.devices for node in found.nodes] == [(), (), (0, 1)]


@pytest.mark.parametrize("body", ["a: {kind: cuda}", "a: {devices: 2}"])
def test_a_tool_that_is_there_and_fails_is_named_with_its_error(tmp_path: Path, body: str) -> None:
    """A node with a broken driver must not count as one of CPUs without a word."""
    error = "Failed to initialize NVML: Driver/library version mismatch"
    script = {("a", "examine"): {"commands": {"npu": MISSING, "cuda": output(error, 18)}}}
    cluster = inventory(tmp_path, body)
    with Connections(ScriptedTransport(script)) as connections:
        found = [*kinds.checked(cluster, connections)[1], *kinds.unexpected(cluster, connections)]
    (odd,) = [entry for entry in found if not entry.is_sound]
    assert f"nvidia-smi: {error}" in odd.what and "restart the node" in odd.remedy


def test_kind_on_the_command_line_fills_in_what_the_inventory_leaves_out(tmp_path: Path) -> None:
    for kind, expected in (("npu", ((), ("devices",))), ("cpu", ((0,), ()))):
        token = choices.KIND.set(kind)
        try:
            (node,) = inventory(tmp_path, "a: {}").nodes
        finally:
            choices.KIND.reset(token)
        assert (node.kind, node.devices, node.unnamed) == (kind, *expected)


def test_this_machine_alone_has_an_address(tmp_path: Path) -> None:
    (node,) = inventory(tmp_path, "g1: {host: local}").nodes
    assert (node.host, node.address, node.server_id) == ("local", "127.0.0.1", "127.0.0.1")
    (node,) = inventory(tmp_path, "g1: {host: local, address: 10.0.0.1}").nodes
    assert (node.address, node.server_id) == ("10.0.0.1", "10.0.0.1")
