"""A real Slurm over the nodes of a sandbox, and jobs that run on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.sandbox import cluster, namespaces, queue
from tests.support.slurm_login import Login, login_of

WHY_NOT = queue.why_not()
pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(WHY_NOT), reason=f"Slurm: {WHY_NOT}")]
# Without namespaces all nodes are this machine, which SSH and Slurm cannot tell apart.
APART = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())
NODES = 2


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    with login_of(tmp_path_factory.mktemp("slurm") / "box", NODES) as found:
        yield found


def test_slurm_runs_tasks_on_the_nodes_and_hands_out_their_devices(login: Login) -> None:
    done = login("srun", f"-N{NODES}", "--gres=npu:8", "-l", "printenv", "SLURMD_NODENAME")
    assert set(done.stdout.split("\n")) == {"0: node1", "1: node2", ""}, done.stderr
    refused = login("srun", "--gres=npu:9", "hostname")
    assert refused.returncode and "not available" in refused.stderr


def test_down_ends_every_daemon_of_slurm(tmp_path: Path) -> None:
    box = cluster.up(tmp_path / "box", nodes=1, devices=1, mode="embedded", with_queue=True)
    records = [path.stem for path in box.layout.processes.glob("*.json")]
    assert {queue.MUNGED, queue.CONTROLLER, "slurmd-node1"} <= set(records)
    box.down()
    assert cluster.running(tmp_path / "box") == 0
    assert not (tmp_path / "box").exists()


@APART
def test_inside_an_allocation_commands_need_no_ssh(login: Login) -> None:
    # Nothing answers at the addresses of Slurm's inventory but slurmd: SSH is at ports of this machine.
    done = login.inside(
        "$C nodes --json",
        "$C exec all -- cat /proc/sys/kernel/hostname",
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


@APART
def test_a_submitted_job_waits_runs_and_is_shown_and_cancelled(login: Login) -> None:
    asked = "slurm: {nodes: 2, time: 10, extra: [--exclusive]}"
    for part, text in (("{nodes: 9}", "not available"), ("{partition: lost}", "partition")):
        (login.folder / "job.yaml").write_text(f"command: [hostname]\nslurm: {part}\n")
        refused = login.clusterctl("submit", "slurm", "job.yaml")
        assert refused.returncode == 2 and text in refused.stderr, refused.stderr
        assert "the cluster has sandbox: 2 nodes" in refused.stderr and "npu:8" in refused.stderr
    program = (
        'print("out of", __import__("os").environ["WORLD_SIZE"], flush=True); __import__("time").sleep({})'
    )
    # An exclusive job gets all devices of its nodes.
    command = f"devices: 1\ncommand: [{sys.executable}, -c, '{program}']"
    first, _ = login.submit(f"{command.format(600)}\ngrace: 1\n{asked}\n")
    login.wait(first, lambda state: state["phase"] == "running", 60)
    second, _ = login.submit(f"{command.format(0)}\n{asked}\n")
    # Slurm adds the reason, Resources, at its next round.
    waiting = login.wait(second, lambda state: "is pending" in state["verdict"], 60)
    assert waiting["phase"] == "pending"
    cancelled = login.clusterctl("stop", second)
    assert "cancelled before it started" in cancelled.stderr, cancelled.stderr
    assert login.clusterctl("stop", first).returncode == 0
    # The inventory of a project is for SSH: a submitted job runs on the nodes that Slurm has given to it.
    (login.folder / "cluster.yaml").write_text("nodes: [elsewhere.invalid]\n")
    third, _ = login.submit(f"{command.format(0)}\n{asked}\n")
    followed = login.clusterctl("logs", "tail", "-f", third)
    assert "out of 2" in followed.stdout, followed.stdout + followed.stderr
    assert login.ended(third, 60)["phase"] == "finished"
    phases = {row["run"]: row["phase"] for row in json.loads(login.clusterctl("runs", "--json").stdout)}
    assert (phases[first], phases[second], phases[third]) == ("stopped", "stopped", "finished")
