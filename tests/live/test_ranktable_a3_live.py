"""Rank tables of simulated A3 nodes, built over real SSH."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clusterctl.cli.commands import application
from clusterctl.errors import InputFaults, WorkFailed
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.ranktable import api
from clusterctl.sandbox import cluster as sandbox_cluster
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


def typed(cluster: inventory_cluster.Cluster, output: Path, *words: str) -> Result:
    return CliRunner().invoke(
        application("ranktable"), ["build", "-c", cluster.source, "-o", str(output), *words]
    )


def built(cluster: inventory_cluster.Cluster, output: Path, *words: str) -> BaseException | None:
    return typed(cluster, output, *words).exception


def answers_of(node: inventory_cluster.Node) -> Path:
    return Path(node.hccn_conf or "").with_name("hccn_tool.answers")


@pytest.fixture
def boards(cluster: inventory_cluster.Cluster) -> Iterator[None]:
    """The nodes' boards are those of A3 for the time of a test."""
    before = {node.name: answers_of(node).read_text() for node in cluster.nodes}
    for node in cluster.nodes:
        answers_of(node).write_text(before[node.name] + "npu_name=9392\n")
    yield
    for node in cluster.nodes:
        answers_of(node).write_text(before[node.name])


def test_a3_nodes_make_a_table_with_super_pods(cluster: inventory_cluster.Cluster, tmp_path: Path) -> None:
    path = tmp_path / "a3.json"
    assert built(cluster, path, "--for", "a3", "--devices", "3,0") is None
    value = json.loads(path.read_text())
    assert (value["version"], api.check(path.read_bytes(), "a3")) == ("1.2", [])
    (pod,) = value["super_pod_list"]
    assert [one["server_id"] for one in pod["server_list"]] == [node.server_id for node in cluster.nodes]
    devices = value["server_list"][1]["device"]
    assert [(one["device_id"], one["rank_id"]) for one in devices] == [("3", "2"), ("0", "3")]
    assert int(devices[0]["super_device_id"]) == int(devices[1]["super_device_id"]) + 3
    # 192.168.110.x: the vnic's.
    assert all(".1" in one["device_ip"].split("168")[1] for one in devices)


def test_what_has_no_address_is_refused_or_left_out_when_asked(
    cluster: inventory_cluster.Cluster, tmp_path: Path
) -> None:
    conf = Path(cluster.nodes[1].hccn_conf or "")
    before = conf.read_text()
    conf.write_text("".join(line for line in before.splitlines(True) if "_2=" not in line))
    try:
        path = tmp_path / "a2.json"
        assert isinstance(built(cluster, path), WorkFailed) and not path.exists()
        assert built(cluster, path, "--skip-incomplete") is None
    finally:
        conf.write_text(before)
    assert [[one.device_id for one in server.devices] for server in api.load(path).servers] == [
        [0, 1, 2, 3], [0, 1, 3],
    ]  # fmt: skip


@pytest.mark.usefixtures("boards")
def test_a3_nodes_are_told_by_their_own_answers(cluster: inventory_cluster.Cluster, tmp_path: Path) -> None:
    done = typed(cluster, tmp_path / "a3.json")
    assert done.exit_code == 0, repr(done.exception)
    assert "node[1-2] are a3 according to npu-smi: version 1.2; --for a2 writes 1.0" in done.stderr
    assert api.load(tmp_path / "a3.json").version == "1.2"
    assert built(cluster, tmp_path / "a2.json", "--for", "a2") is None
    assert api.load(tmp_path / "a2.json").version == "1.0"
    answers = answers_of(cluster.nodes[1])
    answers.write_text(answers.read_text().replace("npu_name=9392\n", ""))
    mixed = built(cluster, tmp_path / "mixed.json")
    assert isinstance(mixed, InputFaults) and not (tmp_path / "mixed.json").exists()
    assert [fault.where for fault in mixed.faults] == ["node1", "node2"]


@pytest.mark.usefixtures("boards")
def test_a_launch_gives_a3_nodes_the_same_table_as_a_build(
    cluster: inventory_cluster.Cluster, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a3\nrank_table: always\n"
        "command: [python, -c, \"import os; print(open(os.environ['RANK_TABLE_FILE']).read())\"]\n"
    )
    shell = Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": cluster.source})
    done = shell("launch", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert "a3 according to npu-smi: version 1.2" in done.stderr
    assert built(cluster, tmp_path / "built.json") is None
    (kept,) = tmp_path.glob("**/rank_table.json")
    assert kept.read_text() == (tmp_path / "built.json").read_text()


@pytest.mark.usefixtures("boards")
def test_a_device_with_another_place_in_its_super_pod_is_caught(
    cluster: inventory_cluster.Cluster, tmp_path: Path
) -> None:
    shell = Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": cluster.source})
    assert shell("ranktable", "build", "-o", "a3.json").returncode == 0
    assert shell("ranktable", "push", "a3.json").returncode == 0
    assert shell("ranktable", "verify", "a3.json").returncode == 0
    answers = answers_of(cluster.nodes[1])
    answers.write_text(answers.read_text() + "sdid_2=7\n")
    done = shell("ranktable", "verify", "a3.json")
    assert done.returncode == 1
    assert "node2 device 2: the super-device id is 7, and the table has" in done.stdout


def test_a_2_0_table_is_verified_by_its_addresses(cluster: inventory_cluster.Cluster, tmp_path: Path) -> None:
    addresses = [
        [
            line.partition("=")[2]
            for line in Path(node.hccn_conf or "").read_text().splitlines()
            if "address_" in line
        ]
        for node in reversed(cluster.nodes)
    ]
    address = '{"addr_type": "IPV4", "addr": "%s", "ports": ["0/0"]}'
    level = '[{"net_layer": 0, "net_instance_id": "rack{n}", "net_type": "CLOS", "rank_addr_list": [%s]}]'
    lines = ["for: a5", "nodes:"]
    for number, found in enumerate(addresses):
        lines += [f"  n{number}:", "    levels:", *(f"      - {level % (address % one)}" for one in found)]
    (tmp_path / "plan.yaml").write_text("\n".join(lines) + "\n")
    shell = Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": cluster.source})
    for words in (
        ("build", "--from", "plan.yaml", "-o", "a5.json"),
        ("push", "a5.json"),
        ("verify", "a5.json"),
    ):
        done = shell("ranktable", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "not compared: net_instance_id" in done.stderr
        and "node2: ok: the same file, 4 devices" in done.stdout
    )
    conf = Path(cluster.nodes[0].hccn_conf or "")
    before = conf.read_text()
    conf.write_text(before.replace(f"address_3={addresses[1][3]}", "address_3=192.168.40.77"))
    try:
        done = shell("ranktable", "verify", "a5.json", "--json")
    finally:
        conf.write_text(before)
    found = [(one["node"], one["device"], one["kind"]) for one in json.loads(done.stdout)["findings"]]
    assert (done.returncode, found) == (1, [("node1", 3, "address")])
