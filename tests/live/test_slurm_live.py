"""A real Slurm over the nodes of a sandbox, and jobs that run on it."""

from __future__ import annotations

import os
import subprocess
import sys
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


def inside(made: cluster.Sandbox, *lines: str, nodes: int = NODES) -> subprocess.CompletedProcess[str]:
    """Run shell lines inside an allocation of all devices, where $C is clusterctl."""
    folder = made.directory / "shared"
    (folder / "home").mkdir(parents=True, exist_ok=True)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("CLUSTERCTL_", "SLURM_"))}
    root = Path(__file__).resolve().parents[2]
    variables = {"HOME": str(folder / "home"), "PYTHONPATH": str(root), "NO_COLOR": "1", "COLUMNS": "200"}
    variables["C"] = f"{sys.executable} -m clusterctl"
    # The inventory of the sandbox is above this folder, so a project of its own begins here.
    (folder / "clusterctl.yaml").write_text("runs: runs\n")
    script = ["set -e", f"cd {folder}", *lines]
    command = [str(slurm.login_script(made.layout)), "salloc", "--quiet", f"-N{nodes}", "--gres=npu:8"]
    return subprocess.run(
        [*command, "bash", "-c", "\n".join(script)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={**kept, **variables},
    )


@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())
def test_inside_an_allocation_commands_need_no_ssh(made: cluster.Sandbox) -> None:
    # Nothing answers at the addresses of Slurm's inventory but slurmd: SSH is at ports of this machine.
    done = inside(
        made,
        "$C nodes --json",
        "$C exec all -- printenv SLURMD_NODENAME",
        "$C ranktable build -o table.json",
        'mkdir -p code; echo \'import os; print(os.environ["RANK"], "SLURM_PROCID" in os.environ)\' > code/x.py',
        "$C push code /tmp/pushed; $C exec node2 -- cat /tmp/pushed/x.py",
        f"$C launch --no-checks --code code --devices 2 -- {sys.executable} x.py",
        "$C logs show last --rank 0-3",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"kind": "npu"' in done.stdout
    assert "node1: node1\n" in done.stdout and "node2: node2\n" in done.stdout
    assert "2 servers, 16 ranks" in done.stdout + done.stderr
    assert "node2: import os" in done.stdout
    for rank in range(4):
        # Slurm's variables about its own tasks would mislead programs in the ranks.
        assert f"{rank} False" in done.stdout, done.stdout + done.stderr
