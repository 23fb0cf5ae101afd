"""Jobs on a real Grid Engine over the nodes of a sandbox."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.support.grid_engine import HOSTS, GridEngine, grid_engine, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(WHY_NOT), reason=f"Grid Engine: {WHY_NOT}")]
JOB = """
command: [sh, -c, 'echo rank $RANK of $WORLD_SIZE on $(hostname); sleep $NAP']
env: {{NAP: "{nap}"}}
grace: 5
sge: {{nodes: 2, pe: mpi, slots: 2, devices: 2{more}}}
"""


@pytest.fixture(scope="module")
def sge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    with grid_engine(tmp_path_factory.mktemp("sge") / "box") as found:
        yield found


def submitted(sge: GridEngine, nap: int, more: str = "", words: str = "") -> str:
    """Submit a job that sleeps; return its run."""
    (sge.folder / "job.yaml").write_text(JOB.format(nap=nap, more=more))
    done = sge(f"$C submit sge job.yaml {words}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()[-1]


def test_a_job_runs_on_all_its_hosts_and_is_followed_from_the_login_node(sge: GridEngine) -> None:
    run = submitted(sge, 0)
    assert "4 ranks, 2 nodes" in sge.wait(run, "finished", 90)
    shown = sge(f"$C logs show {run} --rank 0-3").stdout
    found = re.findall(r"rank (\d) of 4 on (node\d)", shown)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2", "3"], shown
    assert sorted(host for _, host in found) == ["node1", "node1", "node2", "node2"], shown
    listed = sge("$C runs").stdout
    assert run in listed and "finished" in listed


def test_inside_a_job_its_hosts_are_the_inventory_and_need_no_ssh(sge: GridEngine) -> None:
    lines = "'#$ -pe mpi 4' '#$ -cwd -V -j y -o inside.log' \"$C exec all -- hostname\""
    done = sge(f"printf '%s\\n' {lines} > inside.sh; qsub -sync y inside.sh; cat inside.log")
    assert "node1: node1\n" in done.stdout and "node2: node2\n" in done.stdout, done.stdout + done.stderr


def test_a_job_that_the_cluster_cannot_run_is_refused(sge: GridEngine) -> None:
    (sge.folder / "job.yaml").write_text(JOB.format(nap=0, more=""))
    for changes, why in (("sge.pe=lost", "does not exist"), ("sge.nodes=9", "only offers 4 slots")):
        done = sge(f"$C submit sge job.yaml --set {changes}")
        assert done.returncode == 2 and why in done.stderr and "qconf -spl" in done.stderr, done.stderr
    assert "found suitable queue" in sge("$C submit sge job.yaml --test").stdout


def test_a_running_job_is_stopped_by_its_controller_and_a_waiting_one_is_deleted(sge: GridEngine) -> None:
    run = submitted(sge, 300)
    sge.wait(run, "running", 60)
    waiting = submitted(sge, 300)
    assert "is waiting" in sge(f"$C status {waiting}").stdout
    done = sge(f"$C stop {waiting}; $C stop {run}")
    assert "was cancelled before it started" in done.stderr, done.stderr
    assert "has ended it" in done.stderr and f"{run} is stopped" in done.stderr, done.stderr
    assert not sge("sleep 3; qstat; pgrep -f 'sleep 300'").stdout


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_saves_before_its_time_ends_and_waits_for_nodes_again(sge: GridEngine, nodes: int) -> None:
    run = submitted(sge, 300, "", "" if nodes == 2 else "--set sge.nodes=1")
    sge.wait(run, "running", 60)
    for node in HOSTS:
        sge(f"pkill -USR1 -f 'submit start .*{run}'", node=node)
    deadline = time.monotonic() + 120
    while "attempt 2" not in sge(f"$C status {run}").stdout:
        assert time.monotonic() < deadline, (sge.folder / "runs" / run / "sge.log").read_text()
        time.sleep(1)
    assert "saved; Grid Engine job" in (sge.folder / "runs" / run / "sge.log").read_text()
    sge(f"$C stop {run}")
