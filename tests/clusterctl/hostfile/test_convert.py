"""Hostfiles from one launcher to another: any to any that can hold it, and refusals that name what would be lost."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from clusterctl.cli.commands import application
from clusterctl.errors import InputFaults, UsageError
from clusterctl.hostfile import convert, detect
from clusterctl.hostfile.detect import Source
from clusterctl.hostfile.formats import Entry
from clusterctl.inventory import cluster
from clusterctl.inventory.cluster import Cluster, Node

EXAMPLES = Path(__file__).parents[3] / "rank_tables"
FOUR = EXAMPLES / "hccl_4s_32p.json"

program = application()


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    (here / "ds").write_text("w0 slots=4\nw1 slots=4\n")
    return here


def typed(*words: str) -> Result:
    return CliRunner().invoke(program, ["hostfile", *words])


def refused(*words: str) -> str:
    error = typed(*words).exception
    assert isinstance(error, UsageError) and error.exit_code == 2
    return f"{error.message} / {error.hint}"


TEXTS = {
    "deepspeed": "n1 slots=8\nn2 slots=8\nbig slots=4\n",
    "openmpi": "n1 slots=8\nn2 slots=8\nbig slots=4\n",
    "mpich": "n1:8\nn2:8\nbig:4\n",
    "slurm": "SLURM_JOB_NODELIST='n[1-2],big'\nSLURM_TASKS_PER_NODE='8(x2),4'\n",
    "cluster": "name: {name}\nnodes:\n  n1: {devices: 8}\n  n2: {devices: 8}\n  big: {devices: 4}\n",
}


@pytest.mark.parametrize(("before", "after"), list(permutations(TEXTS, 2)))
def test_what_all_can_hold_goes_from_any_to_any(folder: Path, before: str, after: str) -> None:
    (folder / "nodes").write_text(TEXTS[before].replace("{name}", "nodes"))
    result = typed("convert", "nodes", "--to", after)
    assert result.exit_code == 0, result.exception
    assert result.stdout == TEXTS[after].replace("{name}", "nodes")


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9.-]{0,6}[a-z0-9]", fullmatch=True),
            st.integers(1, 64),
            st.sampled_from([None, "root", "alice"]),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda item: item[0],
    ),
    st.sampled_from(["openmpi", "mpich", "cluster"]),
)
@settings(max_examples=60, deadline=None)
def test_what_a_format_holds_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, nodes: list[tuple[str, int, str | None]], form: str
) -> None:
    path = tmp_path_factory.mktemp("there") / "nodes"
    source = Source("x", "openmpi", tuple(Entry(name, slots, user) for name, slots, user in nodes))
    path.write_text(convert.render(source, form))
    again = detect.read(path)
    assert not again.faults
    assert [(one.address, one.slots, one.user) for one in again.entries] == nodes


@pytest.mark.parametrize(
    ("text", "target", "lost"),
    [
        ("root@a slots=8\n", "deepspeed", "the user root"),
        ("root@a slots=8\n", "slurm", "the user root"),
        ("a slots=8 max_slots=9\n", "mpich", "max_slots=9"),
        ("a slots=8 max_slots=9\n", "cluster", "max_slots=9"),
        ("a\n", "deepspeed", "a node without a number of slots"),
        ("a\n", "torchrun", "a node without a number of slots"),
        ("a slots=2\nb\n", "mpich", "a node without a number of slots"),
        ("fe80::1 slots=8\n", "mpich", "the address fe80::1"),
        ("nodes: {a: {host: 10.0.0.1, port: 2222}}\n", "openmpi", "the port 2222"),
        ("nodes: {a: {gateway: me@gate}}\n", "deepspeed", "the gateway me@gate"),
        ("nodes: {a: {devices: [1, 3]}}\n", "mpich", "which devices: 1,3"),
    ],
)
def test_what_can_not_be_held_is_refused_by_name_and_left_out_on_demand(
    folder: Path, text: str, target: str, lost: str
) -> None:
    (folder / "nodes").write_text(text)
    said = refused("convert", "nodes", "--to", target)
    assert f"{target} can't hold {lost}" in said
    # Without it the node would be another one, or none.
    if "--lossy" not in said:
        assert f"can't hold {lost}" in refused("convert", "nodes", "--to", target, "--lossy")
        return
    result = typed("convert", "nodes", "--to", target, "--lossy")
    assert result.exit_code == 0 and f"lost: nodes{' a' if 'nodes:' in text else ':1'}: " in result.stderr


def test_all_losses_come_at_once_with_their_lines(folder: Path) -> None:
    (folder / "nodes").write_text("root@a slots=8\nb slots=8\nalice@c slots=2 max_slots=4\n")
    with pytest.raises(InputFaults) as caught:
        convert.render(detect.read(Path("nodes")), "slurm")
    assert [fault.where for fault in caught.value.faults] == ["nodes:1", "nodes:3", "nodes:3"]
    assert "--lossy" in caught.value.hint


def test_a_count_fills_what_the_file_does_not_say(folder: Path) -> None:
    (folder / "names").write_text("a\nb\n")
    assert typed("convert", "names", "--to", "deepspeed", "--slots", "8").stdout == "a slots=8\nb slots=8\n"


def test_deepspeeds_filters_choose_slots(folder: Path) -> None:
    assert typed("convert", "ds", "--to", "deepspeed", "-i", "w1").stdout == "w1 slots=4\n"
    assert typed("convert", "ds", "--to", "mpich", "-i", "w0:0,1@w1").stdout == "w0:2\nw1:4\n"
    said = typed("convert", "ds", "--to", "cluster", "-e", "w0@w1:0", "--kind", "npu").stdout
    assert said == "name: ds\nnodes:\n  w1: {kind: npu, devices: [1, 2, 3]}\n"
    assert "which devices: 1,2,3" in refused("convert", "ds", "--to", "deepspeed", "-e", "w0@w1:0")
    assert "no slot 7" in refused("convert", "ds", "--to", "deepspeed", "-i", "w0:7")


def test_check_says_what_a_filter_leaves(folder: Path) -> None:
    shown = "ds: ok: 2 nodes, 6 slots (deepspeed)\n  w0: 0,2\n  w1: 0,1,2,3\n"
    assert typed("check", "ds", "-i", "w1@w0:0,2").stdout == shown
    said = json.loads(typed("check", "ds", "-e", "w0@w1:0", "--json").stdout)
    assert [(one["address"], one["devices"]) for one in said["nodes"]] == [("w1", [1, 2, 3])]
    assert "can't hold which devices: 0,2" in typed("check", "ds", "-i", "w0:0,2", "--for", "mpich").stdout
    assert "no node 'w9'" in refused("check", "ds", "-i", "w9")


def test_a_rank_table_becomes_a_hostfile_and_an_inventory_with_addresses(folder: Path) -> None:
    result = typed("convert", str(FOUR), "--to", "deepspeed")
    assert result.stdout.splitlines()[3] == "10.155.111.143 slots=8"
    assert "no place for: device ips" in result.stderr
    typed("convert", str(FOUR), "--to", "cluster", "-o", "cluster.yaml")
    made, told = cluster.load(folder / "cluster.yaml"), detect.load(FOUR)
    assert made.nodes == told.nodes


def test_ranks_that_do_not_run_node_by_node_have_no_hostfile(folder: Path) -> None:
    table = json.loads(FOUR.read_text())
    one, two = (table["server_list"][place]["device"][0] for place in (0, 1))
    one["rank_id"], two["rank_id"] = two["rank_id"], one["rank_id"]
    (folder / "t.json").write_text(json.dumps(table))
    assert "ranks do not follow the nodes" in refused("convert", "t.json", "--to", "deepspeed")


def test_torchrun_is_told_what_to_type_on_each_node(folder: Path) -> None:
    (folder / "nodes.yaml").write_text(
        "defaults: {kind: npu}\nnodes: {a: {devices: [4, 5, 6, 7]}, b: {devices: 8}}\n"
    )
    said = json.loads(typed("convert", "nodes.yaml", "--to", "torchrun", "--json").stdout)
    assert (said["nnodes"], said["master_addr"], said["master_port"]) == (2, "a", 29500)
    assert [(one["node_rank"], one["nproc_per_node"]) for one in said["nodes"]] == [(0, 4), (1, 8)]
    assert said["nodes"][0]["command"] == (
        "ASCEND_RT_VISIBLE_DEVICES=4,5,6,7 torchrun --nnodes=2 --nproc-per-node=4 --node-rank=0 "
        "--master-addr=a --master-port=29500 train.py"
    )
    drawn = typed("convert", "ds", "--to", "torchrun", "--master-port", "1234").stdout.splitlines()
    assert drawn[0].split() == ["NODE", "NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER"]
    assert drawn[3].split() == ["w1", "2", "4", "1", "w0:1234"]
    assert drawn[-1].startswith("w1: torchrun --nnodes=2 --nproc-per-node=4 --node-rank=1")


def test_a_cluster_is_written_so_that_it_reads_back_as_the_same_nodes(folder: Path) -> None:
    first = Node("a", "gate.example", "10.0.0.1", 2222, "me", None, "me@gate:22", devices=(3, 1), kind="npu",
                 server_id="s1", device_ips=("192.168.1.1", "192.168.1.2"), env={"X": "a: b", "Y": "no"})  # fmt: skip
    nodes = (first, Node("b", "b", "b", devices=(0,), server_id="b"), Node("null", "c", "c", server_id="c"))
    path = folder / "made.yaml"
    path.write_text(convert.cluster_text(Cluster("made", nodes, {"all": ("a", "b")})))
    again = cluster.load(path)
    assert tuple(replace(node, unnamed=()) for node in again.nodes) == nodes and again.groups == {
        "all": ("a", "b")
    }
    assert again.nodes[0].env == first.env


def test_check_tells_the_dialect_and_whether_a_launcher_takes_it(folder: Path) -> None:
    assert typed("check", "ds").stdout == "ds: ok: 2 nodes, 8 slots (deepspeed)\n"
    (folder / "mpi").write_text("root@a slots=8\n")
    assert typed("check", "mpi").exit_code == 0
    result = typed("check", "mpi", "--for", "deepspeed")
    assert result.exit_code == 1 and "mpi:1: deepspeed can't hold the user root" in result.stdout
    said = json.loads(typed("check", "mpi", "--for", "deepspeed", "--json").stdout)
    assert (said["dialect"], said["nodes"][0]["user"], len(said["findings"])) == ("openmpi", "root", 1)
    assert "did you mean 'deepspeed'" in refused("check", "mpi", "--for", "deepsped")


def test_another_file_is_kept_and_a_dry_run_writes_nothing(folder: Path) -> None:
    assert typed("convert", "ds", "--to", "mpich", "-o", "m", "--dry-run").stdout == "w0:4\nw1:4\n"
    assert not (folder / "m").exists()
    said = json.loads(typed("convert", "ds", "--to", "mpich", "-o", "m", "--json").stdout)
    assert said == {"format": "mpich", "nodes": 2, "text": "w0:4\nw1:4\n", "file": "m", "written": True}
    assert typed("convert", "ds", "--to", "mpich", "-o", "m").stdout == "m: already has this content\n"
    assert "another file" in refused("convert", "ds", "--to", "slurm", "-o", "m")


LAB = """\
defaults: {port: 2222, user: al, kind: npu, devices: 8}
nodes:
  n[1-2]: {devices: 8}
  big: {devices: 4}
"""


@pytest.mark.parametrize("target", ["deepspeed", "openmpi", "mpich", "slurm"])
def test_an_inventory_is_built_as_any_launcher_wants_it_and_logins_are_only_told(
    folder: Path, target: str
) -> None:
    (folder / "lab.yaml").write_text(LAB.replace("user: al, ", ""))
    result = typed("build", "-c", "lab.yaml", "--to", target)
    assert (result.exit_code, result.stdout) == (0, TEXTS[target])
    told = f"lost: lab.yaml n1 and 2 more: {target} can't hold the port 2222 (write it to ~/.ssh/config)"
    assert told in result.stderr


def test_ports_that_differ_are_one_line_of_what_is_lost(folder: Path) -> None:
    (folder / "lab.yaml").write_text("nodes:\n  a: {port: 2201}\n  b: {port: 2202}\n  c: {}\n")
    told = "lost: lab.yaml a and 1 more: deepspeed can't hold the port (write it to ~/.ssh/config)\n"
    assert typed("build", "-c", "lab.yaml").stderr.endswith(told)


def test_a_user_is_built_into_the_formats_that_hold_one(folder: Path) -> None:
    (folder / "lab.yaml").write_text(LAB)
    built = typed("build", "-c", "lab.yaml", "-n", "big", "--to", "openmpi")
    assert built.stdout == "al@big slots=4\n" and "user" not in built.stderr
    assert "the user al" in typed("build", "-c", "lab.yaml", "-n", "big").stderr
    again = typed("build", "-c", "lab.yaml", "--to", "cluster").stdout
    (folder / "again.yaml").write_text(again)
    assert cluster.load(folder / "again.yaml").nodes == cluster.load(folder / "lab.yaml").nodes


def test_other_devices_than_the_first_are_built_only_where_they_can_be_chosen(folder: Path) -> None:
    (folder / "lab.yaml").write_text("nodes: {a: {devices: [4, 5], kind: cuda}, b: {devices: [1, 0]}}\n")
    said = refused("build", "-c", "lab.yaml")
    assert "lab.yaml a: deepspeed can't hold which devices: 4,5" in said and "lab.yaml b: " in said
    assert typed("build", "-c", "lab.yaml", "--lossy").stdout == "a slots=2\nb slots=2\n"
    result = typed("build", "-c", "lab.yaml", "-n", "a", "--to", "torchrun", "--slots", "1", "-o", "a.sh")
    assert result.exit_code == 0
    assert (folder / "a.sh").read_text().startswith("CUDA_VISIBLE_DEVICES=4 torchrun --nnodes=1 ")
    assert (
        "--master-port=77"
        in typed("build", "-c", "lab.yaml", "-n", "a", "--to", "torchrun", "--master-port", "77").stdout
    )


def test_more_ranks_than_devices_are_a_count_and_never_more_than_an_inventory_holds(folder: Path) -> None:
    (folder / "lab.yaml").write_text("nodes: {a: {devices: [4, 5], kind: cuda}}\n")
    assert typed("build", "-c", "lab.yaml", "--slots", "9").stdout == "a slots=9\n"
    assert "at most 64" in refused("build", "-c", "lab.yaml", "--slots", "65", "--to", "cluster")
    assert "did you mean 'slurm'" in refused("build", "-c", "lab.yaml", "--to", "slum")
