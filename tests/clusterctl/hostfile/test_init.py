"""`clusterctl init`: a commented cluster.yaml from a node set or from any file that names nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clusterctl.cli.commands import application
from clusterctl.errors import InputFaults, UsageError
from clusterctl.hostfile import detect
from clusterctl.inventory import cluster

FOUR = Path(__file__).parents[3] / "rank_tables" / "hccl_4s_32p.json"


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    return here


def typed(*words: str) -> Result:
    return CliRunner().invoke(application(), ["init", *words])


def refused(*words: str) -> UsageError:
    error = typed(*words).exception
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert not Path("cluster.yaml").exists()
    return error


DIALECTS = {
    "deepspeed": "a slots=8\nb slots=8\nc slots=4\n",
    "openmpi": "root@a slots=8\nb slots=8 max_slots=9\nc\n",
    "mpich": "a:8\nb:4 user=root\n10.0.0.9:2\n",
    "slurm": "SLURM_JOB_NODELIST='n[03,01-02]'\nSLURM_TASKS_PER_NODE='8(x2),4'\n",
    "names": "10.0.0.7\nfe80::1\nnode1\n",
    "cluster": "known_hosts: known\ngroups: {left: a}\n"
    "nodes: {a: {host: 10.0.0.1, port: 2222, env: {X: 'no: 1'}}, b: {devices: 2, kind: cuda}}\n",
    "cpus": "nodes: {a: {devices: 1}, b: {devices: 0}, c: {devices: [3, 1], kind: npu}}\n",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_any_file_becomes_an_inventory_of_the_same_nodes(folder: Path, name: str) -> None:
    (folder / "given").write_text(DIALECTS[name])
    assert typed("--hostfile", "given").exit_code == 0
    meant, made = detect.load(folder / "given", "npu"), cluster.load(folder / "cluster.yaml")
    unsaid = [entry.slots is None for entry in detect.read(folder / "given").entries]
    for silent, one, node in zip(unsaid, meant.nodes, made.nodes, strict=True):
        devices = tuple(range(8)) if silent else one.devices
        assert replace(node, unnamed=()) == replace(one, name=node.name, devices=devices, unnamed=())
    assert (made.groups, made.known_hosts) == (meant.groups, meant.known_hosts)
    text = (folder / "cluster.yaml").read_text()
    assert text.startswith("# The machines that clusterctl reaches, from given. ")


def test_a_rank_table_gives_names_and_keeps_the_device_addresses(folder: Path) -> None:
    assert typed("--hostfile", str(FOUR), "-o", "lab.yaml").exit_code == 0
    made = cluster.load(folder / "lab.yaml")
    assert made.names == ["node1", "node2", "node3", "node4"]
    assert [node.device_ips for node in made.nodes] == [node.device_ips for node in detect.load(FOUR).nodes]


def test_addresses_get_names_that_are_free(folder: Path) -> None:
    typed("--hosts", "10.0.0.[1-2],node1,node3")
    made = cluster.load(folder / "cluster.yaml")
    assert [(node.name, node.host) for node in made.nodes] == [
        ("node2", "10.0.0.1"),
        ("node4", "10.0.0.2"),
        ("node1", "node1"),
        ("node3", "node3"),
    ]


def test_without_a_name_it_is_an_example_and_a_dry_run_only_prints_it(folder: Path) -> None:
    said = typed("--dry-run").stdout
    assert cluster.parse(said, folder / "x.yaml").names == ["node1", "node2"]
    assert not (folder / "cluster.yaml").exists()


def test_devices_and_kind_fill_what_the_file_does_not_say(folder: Path) -> None:
    (folder / "hosts").write_text("a slots=8\nb\n")
    assert (
        "does not say which devices b have: 8 each are written"
        in typed("--hostfile", "hosts", "--dry-run").stderr
    )
    result = typed("--hostfile", "hosts", "--devices", "[4,8)", "--kind", "cuda", "--dry-run")
    made = cluster.parse(result.stdout, folder / "x.yaml")
    assert [(node.devices, node.kind) for node in made.nodes] == [
        (tuple(range(8)), "cuda"),
        ((4, 5, 6, 7), "cuda"),
    ]
    assert result.stderr == ""


def test_what_an_inventory_can_not_hold_is_said(folder: Path) -> None:
    (folder / "hosts").write_text("a slots=8 max_slots=9\n")
    assert "lost: hosts:1: cluster can't hold max_slots=9" in typed("--hostfile", "hosts").stderr


def test_an_earlier_file_is_kept_unless_forced(folder: Path) -> None:
    (folder / "cluster.yaml").write_text("mine\n")
    result = typed("--hosts", "a")
    assert isinstance(result.exception, UsageError) and "--force" in result.exception.hint
    assert (folder / "cluster.yaml").read_text() == "mine\n"
    assert typed("--hosts", "a", "--force").exit_code == 0
    assert cluster.load(folder / "cluster.yaml").names == ["a"]


def test_all_faults_of_the_file_and_the_options_come_at_once(folder: Path) -> None:
    (folder / "hosts").write_text("-oX slots=8\na;b slots=8\nc slots=0\nd slots=8\nd slots=8\n")
    error = refused("--hostfile", "hosts", "--kind", "gpu", "--devices", "[0,8]")
    assert isinstance(error, InputFaults)
    places = ["--kind", "--devices", "hosts:1", "hosts:2", "hosts:3", "hosts:5"]
    assert [fault.where for fault in error.faults] == places


@pytest.mark.slow
def test_what_would_make_no_inventory_is_refused(folder: Path) -> None:
    (folder / "hosts").write_text("a slots=8\n")
    (folder / "lab.yaml").write_text("nodes: [a]\n")
    assert "together" in refused("--hosts", "a", "--hostfile", "hosts").message
    assert "'a+b' is not a name" in refused("--hosts", "a+b,c").message
    assert "not an IPv4 address" in refused("--hosts", "10.0.0.[254-256]").message
    assert "at most 50,000" in refused("--hosts", "node[1-50001]").message
    (folder / "many").write_text("".join(f"n{number}\n" for number in range(50_001)))
    assert "many: 50,001 nodes" in refused("--hostfile", "many").message
    assert "has the devices of every node" in refused("--hostfile", "hosts", "--devices", "4").message
    assert "has the kind of the devices" in refused("--hostfile", "lab.yaml", "--kind", "npu").message
    assert "none: no such file" in refused("--hostfile", "none").message
