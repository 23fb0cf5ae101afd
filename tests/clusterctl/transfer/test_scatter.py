"""The shards of a corpus, each to its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.transfer.scatter import portions, scatter
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport


def lab(folder: Path, count: int) -> Cluster:
    nodes = [
        Node(f"node{n}", "local", f"127.0.0.{n}", port=n, workdir=str(folder / f"n{n}"), server_id=f"n{n}")
        for n in range(1, count + 1)
    ]
    return Cluster("lab", tuple(nodes), source="cluster.yaml")


def shards(folder: Path, count: int) -> list[str]:
    folder.mkdir()
    for number in range(count):
        for ending in ("bin", "idx", "manifest.json"):
            (folder / f"c-{number}.{ending}").write_text(f"{number} {ending}")
    return [str(folder / f"c-{number}") for number in range(count)]


def test_shards_go_round_the_nodes_by_prefix_or_by_file(tmp_path: Path) -> None:
    names = shards(tmp_path / "data", 5)
    for given in (names, [str(path) for path in (tmp_path / "data").iterdir()]):
        folder, found = portions(lab(tmp_path, 3), given)
        assert folder == tmp_path / "data"
        assert [(one.node.name, one.shards) for one in found] == [
            ("node1", ("c-0", "c-3")),
            ("node2", ("c-1", "c-4")),
            ("node3", ("c-2",)),
        ]
        assert found[2].files == ("c-2.bin", "c-2.idx", "c-2.manifest.json")
    assert len(portions(lab(tmp_path, 9), names)[1]) == 5


def test_shards_that_are_none_are_told_at_once(tmp_path: Path) -> None:
    names = shards(tmp_path / "data", 2)
    (tmp_path / "data" / "c-1.idx").unlink()
    with pytest.raises(InputFaults) as caught:
        portions(lab(tmp_path, 2), [*names, str(tmp_path / "none")])
    told = str(caught.value)
    assert "c-1.idx" in told and "none.bin" in told and "is not in" in told


def test_each_node_has_its_own_and_a_second_time_moves_nothing(tmp_path: Path) -> None:
    cluster = lab(tmp_path, 2)
    folder, given = portions(cluster, shards(tmp_path / "data", 3))
    # Both are this machine: a path of each node's own, below its work folder.
    with Connections(LocalTransport(home=tmp_path)) as connections:
        for unchanged in (False, True):
            for one in given:
                dest = str(tmp_path / f"there-{one.node.name}")
                (outcome,) = scatter(folder, [one], dest, connections, lambda node: lambda done, total: None)
                assert outcome.get().unchanged == unchanged
    names = {path.name for path in (tmp_path / "there-node1").iterdir() if not path.name.startswith(".")}
    assert names == {f"c-{n}.{ending}" for n in (0, 2) for ending in ("bin", "idx", "manifest.json")}
    assert (tmp_path / "there-node2" / "c-1.bin").read_text() == "1 bin"
