"""Rank tables built over real SSH."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.backends.reach import transport_to
from clusterctl.errors import WorkFailed
from clusterctl.hostfile import convert
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.ranktable import api, devices
from clusterctl.sandbox import cluster as sandbox_cluster
from clusterctl.transport.fanout import Connections
from tests.live.conftest import Shell, clean_environment

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(sys.platform != "linux", reason="sandbox nodes need Linux"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[inventory_cluster.Cluster]:
    made = sandbox_cluster.up(tmp_path_factory.mktemp("nodes") / "sandbox", nodes=2, devices=4)
    yield inventory_cluster.load(made.cluster_file)
    made.down()


def answers(
    cluster: inventory_cluster.Cluster,
) -> list[tuple[inventory_cluster.Node, list[devices.DeviceAddress]]]:
    with Connections(transport_to(cluster)) as connections:
        outcomes = connections.on_each(cluster.nodes, lambda node, link: devices.read_addresses(link, node))
        return [(outcome.node, outcome.get()) for outcome in outcomes]


def test_the_nodes_own_answers_make_a_table_that_passes(cluster: inventory_cluster.Cluster) -> None:
    table = api.build(answers(cluster))
    assert (table.ranks, api.check(table.render())) == (8, [])
    for node, server in zip(cluster.nodes, table.servers, strict=True):
        assert node.hccn_conf is not None
        told = dict(line.split("=") for line in Path(node.hccn_conf).read_text().splitlines())
        assert [device.device_ip for device in server.devices] == [told[f"address_{one}"] for one in range(4)]
    assert json.loads(table.render())["server_list"][1]["device"][0]["rank_id"] == "4"


def test_an_unconfigured_device_is_named_with_its_node(cluster: inventory_cluster.Cluster) -> None:
    conf = Path(cluster.nodes[1].hccn_conf or "")
    before = conf.read_text()
    conf.write_text("".join(line for line in before.splitlines(True) if "_2=" not in line))
    try:
        with pytest.raises(WorkFailed, match="node2: device 2 without an address"):
            answers(cluster)
    finally:
        conf.write_text(before)


def test_where_no_device_has_ipv4_the_table_is_ipv6(cluster: inventory_cluster.Cluster) -> None:
    before = {node.name: Path(node.hccn_conf or "").read_text() for node in cluster.nodes}
    for node in cluster.nodes:
        Path(node.hccn_conf or "").write_text("")
    try:
        table = api.build(answers(cluster))
    finally:
        for node in cluster.nodes:
            Path(node.hccn_conf or "").write_text(before[node.name])
    assert all(":" in device.device_ip for _, device in table.by_rank())


# -- a table on the nodes


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sandbox_cluster.Sandbox]:
    made = sandbox_cluster.up(tmp_path_factory.mktemp("four") / "sandbox", nodes=4, devices=2)
    yield made
    made.down()


@pytest.fixture
def typed(four: sandbox_cluster.Sandbox, tmp_path: Path) -> Shell:
    """A folder with the nodes' own table in it, pushed to all of them."""
    shell = Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": str(four.cluster_file)})
    assert shell("ranktable", "build", "-o", "table.json").returncode == 0
    done = shell("ranktable", "push", "table.json", "--json")
    assert done.returncode == 0, done.stderr
    assert {one["sha256"] for one in json.loads(done.stdout)} == {digest(tmp_path / "table.json")}
    return shell


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def home(four: sandbox_cluster.Sandbox, node: str) -> Path:
    return four.cluster_file.parent / node / "home"


def drifts(shell: Shell) -> list[tuple[str, int | None, str]]:
    done = shell("ranktable", "verify", "table.json", "--json")
    found = [(one["node"], one["device"], one["kind"]) for one in json.loads(done.stdout)["findings"]]
    assert done.returncode == (1 if found else 0), done.stderr
    return found


def test_a_table_altered_on_one_of_four_nodes_is_caught(four: sandbox_cluster.Sandbox, typed: Shell) -> None:
    assert drifts(typed) == []
    for number in range(1, 5):
        path = home(four, f"node{number}") / "table.json"
        assert digest(path) == digest(typed.folder / "table.json")
        assert path.stat().st_mode & 0o777 == 0o644 and not path.is_symlink()
    there = home(four, "node3") / "table.json"
    there.write_text(there.read_text().replace("192.168", "192.169"))
    assert drifts(typed) == [("node3", None, "file-differs")]
    (home(four, "node2") / "table.json").unlink()
    there.unlink()
    # The same text, and torch_npu would not take it.
    there.symlink_to(home(four, "node1") / "table.json")
    assert drifts(typed) == [("node2", None, "file-missing"), ("node3", None, "file-kind")]
    changes = json.loads(typed("ranktable", "push", "table.json", "--json").stdout)
    assert [one["change"] for one in changes] == ["unchanged", "new", "replaced", "unchanged"]
    assert drifts(typed) == [] and not there.is_symlink()


def test_a_device_that_moved_or_lost_its_link_is_named(four: sandbox_cluster.Sandbox, typed: Shell) -> None:
    etc = four.cluster_file.parent / "node4" / "etc"
    conf, answers_file = etc / "hccn.conf", etc / "hccn_tool.answers"
    before = conf.read_text(), answers_file.read_text()
    moved = next(line for line in before[0].splitlines() if line.startswith("address_1="))
    conf.write_text(before[0].replace(moved, "address_1=192.168.99.9"))
    faults = before[1].replace("link_0=UP", "link_0=DOWN")
    answers_file.write_text(faults.replace("net_health_0=Success", "net_health_0=Socket failed"))
    try:
        expected = [("node4", 0, "link"), ("node4", 0, "net_health"), ("node4", 1, "address")]
        assert drifts(typed) == expected
        said = typed("ranktable", "verify", "table.json")
    finally:
        conf.write_text(before[0])
        answers_file.write_text(before[1])
    assert said.returncode == 1
    assert f"the table has {moved.partition('=')[2]}, and hccn_tool shows 192.168.99.9" in said.stdout
    assert "node4 device 0: link is DOWN, not UP" in said.stdout
    assert "node1: ok: the same file, 2 devices" in said.stdout


def test_a_node_out_of_reach_is_3_and_hides_no_others_drift(
    four: sandbox_cluster.Sandbox, typed: Shell
) -> None:
    (home(four, "node1") / "table.json").write_text("{}")
    typed.folder.joinpath("cut.yaml").write_text(convert.cluster_text(away(four)))
    done = typed("ranktable", "verify", "table.json", "-c", "cut.yaml", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 3 and "node2" in done.stderr
    assert [one["node"] for one in said["failed"]] == ["node2"]
    assert [(one["node"], one["kind"]) for one in said["findings"]] == [("node1", "file-differs")]


def away(four: sandbox_cluster.Sandbox) -> inventory_cluster.Cluster:
    """The same nodes, but node2 at a port where nobody listens."""
    cluster = inventory_cluster.load(four.cluster_file)
    nodes = tuple(replace(node, port=1) if node.name == "node2" else node for node in cluster.nodes)
    return replace(cluster, nodes=nodes)
