"""The nodes and devices of an allocation, from what Slurm's programs print."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.backends.slurm import allocation, programs
from clusterctl.cli import choices

NODES = (
    "NodeName=node1 Arch=x86_64 Gres=npu:8 NodeAddr=10.0.0.1 State=MIXED OS=Linux 6.1 #1 SMP\n"
    "NodeName=node2 Arch=x86_64 Gres=npu:8 NodeAddr=10.0.0.2 State=MIXED\n"
)


def answers(monkeypatch: pytest.MonkeyPatch, gres: str, config: str = "") -> None:
    """Let Slurm's programs answer with these devices."""
    texts = {"node": NODES, "config": config, "job": f"JobId=7\n JobState=RUNNING\n     {gres}\n"}
    monkeypatch.setattr(programs, "run", lambda *words, **more: texts[words[2]])
    monkeypatch.setattr(programs, "run_together", lambda *commands: [texts[words[2]] for words in commands])


def devices(
    monkeypatch: pytest.MonkeyPatch, gres: str, config: str = ""
) -> list[tuple[str, tuple[int, ...]]]:
    answers(monkeypatch, gres, config)
    monkeypatch.setattr(programs, "is_installed", lambda: True)
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }
    return [
        (node.kind, node.devices) for node in allocation.described(allocation.named(variables, "cpu")).nodes
    ]


@pytest.mark.parametrize(
    ("gres", "kind", "ids"),
    [
        ("Nodes=node[1-2] CPU_IDs=0 Mem=0 GRES=npu(CNT:8)", "npu", tuple(range(8))),
        ("Nodes=node[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0-1)", "cuda", (0, 1)),
        ("Nodes=node[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:3(IDX:0,2-3)", "cuda", (0, 2, 3)),
        ("Nodes=node[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu(IDX:1-2)", "cuda", (1, 2)),
        ("Nodes=node[1-2] CPU_IDs=0 Mem=0 GRES=license:4,npu:2", "npu", (0, 1)),
        ("Nodes=node[1-2] CPU_IDs=0 Mem=0 GRES=", "cpu", (0,)),
    ],
)
def test_devices_of_a_job(
    monkeypatch: pytest.MonkeyPatch, gres: str, kind: str, ids: tuple[int, ...]
) -> None:
    assert devices(monkeypatch, gres) == [(kind, ids)] * 2


def test_nodes_may_have_different_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gres = "Nodes=node1 CPU_IDs=0 GRES=gpu:1(IDX:0)\n     Nodes=node2 CPU_IDs=0 GRES=gpu:1(IDX:3)"
    assert devices(monkeypatch, gres) == [("cuda", (0,)), ("cuda", (3,))]


def test_devices_count_from_0_where_slurm_hides_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gres = "Nodes=node[1-2] CPU_IDs=0 GRES=gpu:2(IDX:2-3)"
    config = "Cgroup Support Configuration:\nConstrainDevices        = yes\n"
    assert devices(monkeypatch, gres, config) == [("cuda", (0, 1))] * 2


def test_nodes_are_reached_by_srun_at_the_addresses_that_slurm_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "")
    monkeypatch.setattr(programs, "is_installed", lambda: True)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    first, second = allocation.described(allocation.named(variables, "cpu")).nodes
    assert (first.host, first.address, first.allocation) == ("node1", "10.0.0.1", "slurm:7")
    assert second.address == "10.0.0.2"
    assert first.workdir != second.workdir


def test_without_the_id_of_a_job_the_names_are_reached_by_ssh() -> None:
    node = allocation.named({"SLURM_JOB_NODELIST": "node1"}, "cpu").nodes[0]
    assert (node.host, node.allocation) == ("node1", "")


@pytest.mark.parametrize(("gres", "assumed"), [("Nodes=node[1-2] GRES=npu(CNT:8)", False), ("GRES=", True)])
def test_devices_that_slurm_has_given_to_a_job_are_no_guess(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gres: str, assumed: bool
) -> None:
    answers(monkeypatch, gres)
    monkeypatch.setattr(programs, "is_installed", lambda: True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    assert choices.cluster_of(None).assumed is assumed
