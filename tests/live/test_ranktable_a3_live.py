"""Rank tables of make-believe A3 nodes, asked for over real SSH."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterctl import inventory, ranktable, sandbox
from clusterctl.cli.ranktable import app
from clusterctl.errors import WorkFailed

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(sys.platform != "linux", reason="sandbox nodes need Linux"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[inventory.Cluster]:
    made = sandbox.up(tmp_path_factory.mktemp("nodes") / "sandbox", nodes=2, devices=4)
    yield inventory.load(made.cluster_file)
    made.down()


def built(cluster: inventory.Cluster, output: Path, *words: str) -> BaseException | None:
    argv = ["build", "-c", cluster.source, "-o", str(output), *words]
    return CliRunner().invoke(app, argv).exception


def test_a3_nodes_make_a_table_with_super_pods(cluster: inventory.Cluster, tmp_path: Path) -> None:
    path = tmp_path / "a3.json"
    assert built(cluster, path, "--for", "a3", "--devices", "3,0") is None
    value = json.loads(path.read_text())
    assert (value["version"], ranktable.check(path.read_bytes(), "a3")) == ("1.2", [])
    (pod,) = value["super_pod_list"]
    assert [one["server_id"] for one in pod["server_list"]] == [node.server_id for node in cluster.nodes]
    devices = value["server_list"][1]["device"]
    assert [(one["device_id"], one["rank_id"]) for one in devices] == [("3", "2"), ("0", "3")]
    assert int(devices[0]["super_device_id"]) == int(devices[1]["super_device_id"]) + 3
    assert all(".1" in one["device_ip"].split("168")[1] for one in devices)  # 192.168.110.x: the vnic's


def test_what_has_no_address_is_refused_or_left_out_when_asked(
    cluster: inventory.Cluster, tmp_path: Path
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
    assert [[one.device_id for one in server.devices] for server in ranktable.load(path).servers] == [
        [0, 1, 2, 3], [0, 1, 3],
    ]  # fmt: skip
