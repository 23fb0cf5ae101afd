"""A real Slurm over the nodes of a sandbox, and jobs that run on it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.sandbox import cluster, namespaces, slurm

WHY_NOT = slurm.why_not()
pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(WHY_NOT), reason=f"Slurm: {WHY_NOT}")]
NODES = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Sandbox]:
    folder = tmp_path_factory.mktemp("slurm", numbered=True) / "box"
    sandbox = cluster.up(folder, nodes=NODES, devices=8, with_slurm=True)
    yield sandbox
    sandbox.down()


def login(made: cluster.Sandbox, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as on a login node."""
    command = [str(slurm.login_script(made.layout)), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=made.directory)


def test_slurm_runs_tasks_on_the_nodes_and_hands_out_their_devices(made: cluster.Sandbox) -> None:
    done = login(made, "srun", f"-N{NODES}", "--gres=npu:8", "-l", "printenv", "SLURMD_NODENAME")
    assert sorted(done.stdout.split("\n"))[1:] == ["0: node1", "1: node2"], done.stderr
    refused = login(made, "srun", "--gres=npu:9", "hostname")
    assert refused.returncode and "not available" in refused.stderr


@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())
def test_tasks_run_inside_the_nodes(made: cluster.Sandbox) -> None:
    done = login(made, "srun", f"-N{NODES}", "-l", "cat", "/proc/sys/kernel/hostname")
    assert {"0: node1", "1: node2"} == set(done.stdout.splitlines()), done.stderr


def test_down_ends_every_daemon_of_slurm(tmp_path: Path) -> None:
    box = cluster.up(tmp_path / "box", nodes=1, devices=1, with_slurm=True)
    records = [path.stem for path in box.layout.processes.glob("*.json")]
    assert {slurm.MUNGED, slurm.CONTROLLER, "slurmd-node1"} <= set(records)
    box.down()
    assert cluster.running(tmp_path / "box") == 0
    assert not (tmp_path / "box").exists()
