"""Any file that names nodes, and a Slurm allocation, as an inventory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clusterctl.cli.commands import application
from clusterctl.errors import ClusterctlError, InputFaults, UsageError
from clusterctl.hostfile import detect, kinds

EXAMPLES = Path(__file__).parents[3] / "rank_tables"

program = application()


@pytest.fixture(autouse=True)
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE", "CLUSTERCTL_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    return here


def typed(*words: str) -> Result:
    return CliRunner().invoke(program, words)


def devices(*words: str) -> dict[str, int]:
    result = typed("nodes", "--json", *words)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return {one["name"]: len(one["devices"]) for one in json.loads(result.stdout)["nodes"]}


DIALECTS = {
    "deepspeed": ("a slots=8\nb slots=4\n", "deepspeed"),
    "openmpi": ("root@a slots=8 max_slots=9\nb slots=4\n", "openmpi"),
    "mpich": ("a:8\nb:4 user=root\n", "mpich"),
    "slurm": ("SLURM_JOB_NODELIST=a,b\nSLURM_TASKS_PER_NODE=8,4\n", "slurm"),
    "yaml": ("nodes:\n  a: {devices: 8}\n  b: {devices: 4}\n", "cluster"),
    "json": ('{"nodes": {"a": {"devices": 8}, "b": {"devices": 4}}}', "cluster"),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_is_told_by_its_content_and_serves_as_an_inventory(folder: Path, name: str) -> None:
    text, dialect = DIALECTS[name]
    (folder / "nodes.txt").write_text(text)
    assert detect.read(folder / "nodes.txt").dialect == dialect
    assert devices("-c", "nodes.txt") == devices("--hostfile", "nodes.txt") == {"a": 8, "b": 4}


def test_bare_names_are_a_rank_each_and_a_list_is_opened(folder: Path) -> None:
    (folder / "names").write_text("a\nb # second\n")
    (folder / "list").write_text("n[08-10]\n")
    assert devices("-c", "names") == {"a": 1, "b": 1}
    assert list(devices("-c", "list")) == ["n08", "n09", "n10"]


def test_a_rank_table_gives_nodes_with_their_devices_addresses() -> None:
    cluster = detect.load(EXAMPLES / "hccl_4s_32p.json")
    first = cluster.nodes[0]
    assert len(cluster.nodes) == 4 and (first.kind, first.devices) == ("npu", tuple(range(8)))
    assert first.address == first.server_id == "10.155.111.140" and len(first.device_ips) == 8


def test_a_hostfiles_user_and_the_settings_kind_reach_the_nodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "hosts").write_text("root@a slots=8\n")
    monkeypatch.setenv("CLUSTERCTL_KIND", "npu")
    node = json.loads(typed("nodes", "--json", "-c", "hosts").stdout)["nodes"][0]
    assert (node["user"], node["kind"], node["host"], node["server_id"]) == ("root", "npu", "a", "a")
    monkeypatch.setenv("CLUSTERCTL_KIND", "gpu")
    assert isinstance(typed("nodes", "-c", "hosts").exception, UsageError)


def test_the_allocation_serves_where_there_is_no_cluster_yaml(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[01-03]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "8(x2),4")
    assert devices() == {"n01": 8, "n02": 8, "n03": 4}
    (folder / "hosts").write_text("a slots=1\n")
    assert devices("-c", "hosts") == {"a": 1}
    (folder / "cluster.yaml").write_text("nodes: {mine: {}}\n")
    assert devices() == {"mine": 1}


def test_a_named_inventory_that_is_not_there_is_not_replaced_by_the_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[01-03]")
    monkeypatch.setenv("CLUSTERCTL_CLUSTER", "mine.yaml")
    error = typed("nodes").exception
    assert isinstance(error, UsageError) and "mine.yaml: no such file" in error.message


@pytest.mark.parametrize(
    "text",
    ["-oX slots=8\n", "a slots=0\n", "a slots=1\na slots=2\n", "a;b slots=1\n", "a slots=65\n", "", "nodes: {\n",
     '{"server_list": 1}', "n[1-2],-x\n", "\x00\n", "a slots=1\nb:2\n"],
)  # fmt: skip
def test_a_bad_file_is_refused_in_words_with_its_place(folder: Path, text: str) -> None:
    (folder / "bad").write_text(text)
    error = typed("nodes", "-c", "bad").exception
    assert isinstance(error, InputFaults) and error.faults[0].where.startswith("bad")


def test_no_such_file_and_a_folder_are_the_command_lines_fault(folder: Path) -> None:
    for name in ("none", "none.yaml", "."):
        error = typed("nodes", "-c", name).exception
        assert isinstance(error, ClusterctlError) and error.exit_code == 2


def ranks_of(*places: dict[str, object]) -> str:
    """A 2.0 table with a rank at each place."""
    ranks = [
        {
            "rank_id": rank, "local_id": rank % 2, "device_id": rank % 2,
            "level_list": [{
                "net_layer": 0, "net_instance_id": "rack0", "net_type": "CLOS",
                "rank_addr_list": [{"addr_type": "IPV4", "addr": f"223.0.0.{rank}", "ports": ["0/0"]}],
            }],
            **place,
        }
        for rank, place in enumerate(places)
    ]  # fmt: skip
    return json.dumps({"version": "2.0", "rank_count": len(ranks), "status": "completed", "rank_list": ranks})


def test_a_2_0_table_whose_ranks_say_their_nodes_is_an_inventory(folder: Path) -> None:
    (folder / "a.json").write_text(ranks_of(*[{"host_ip": f"10.0.0.{node}"} for node in (2, 2, 1, 1)]))
    assert devices("-c", "a.json") == {"10.0.0.2": 2, "10.0.0.1": 2}
    named = [{"server_id": f"n{node}", "host_ip": f"10.0.0.{node}"} for node in (1, 1, 2)]
    (folder / "b.json").write_text(ranks_of(*named))
    nodes = json.loads(typed("nodes", "--json", "-c", "b.json").stdout)["nodes"]
    assert [(one["name"], one["address"], one["devices"]) for one in nodes] == [
        ("n1", "10.0.0.1", [0, 1]),
        ("n2", "10.0.0.2", [0]),
    ]


@pytest.mark.parametrize(
    ("places", "where", "word"),
    [
        ([{}, {}], "bad.json", "names no nodes"),
        ([{"host_ip": "10.0.0.1"}, {}], "bad.json rank 1", "its node is unknown"),
        ([{"host_ip": 7}, {"host_ip": "10.0.0.1"}], "bad.json rank 0", "its node is unknown"),
        ([{"server_id": "n1"}, {}, {"server_id": "n1"}], "bad.json rank 1", "its node is unknown"),
        ([{"server_id": "n1"}] * 3, "bad.json rank 2", "has another rank too"),
        ([{"server_id": "n1", "device_id": 64}], "bad.json rank 0", "at most 64"),
        ([{"server_id": "-oX"}], "bad.json rank 0", "is not a name or address that SSH can reach"),
    ],
)
def test_a_2_0_table_that_does_not_say_its_nodes_is_refused_by_rank(
    folder: Path, places: list[dict[str, object]], where: str, word: str
) -> None:
    (folder / "bad.json").write_text(ranks_of(*places))
    error = typed("nodes", "-c", "bad.json").exception
    assert isinstance(error, InputFaults)
    assert error.faults[0].where == where and word in error.faults[0].what


def test_one_rule_decides_the_kind_of_a_file(tmp_path: Path) -> None:
    contents = {
        "a.yaml": ("nodes: [a]", "cluster"),
        "hosts": ("a slots=8\n", "hostfile"),
        "table": ('{"version": "1.0", "server_list": []}', "ranktable"),
        "damaged.json": ("[", "ranktable"),
        "inventory": ("nodes:\n  a: {}\n", "cluster"),
    }
    for name, (text, kind) in contents.items():
        (tmp_path / name).write_text(text)
        assert kinds.kind_of_file(tmp_path / name) == kind, name
