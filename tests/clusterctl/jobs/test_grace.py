"""The time for a last checkpoint follows from the plan; a shorter one is refused, wherever the job runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.jobs.parts.saving import last_save_seconds, with_grace
from clusterctl.jobs.run_lines import Metric
from clusterctl.runs.decide.attempt import StopRequest
from clusterctl.runs.overview import TrainProgress, stop_cost
from clusterctl.runs.stop import send_stop
from clusterctl.transport.fanout import Connections
from tests.clusterctl.conftest import Run
from tests.clusterctl.runs.test_run import connections as connections
from tests.clusterctl.runs.test_run import launched, left_of, program, wait_for

LARGE = """
train:
  model: gpt3-13B
  data: {prefix: x}
  steps: 100
  micro_batch: 1
  global_batch: 64
  precision: fp16
  parallel: {tensor: 8}
  save: {every: 10}
"""
NODES = Cluster("lab", (Node("n1", "n1", "10.9.9.9", devices=tuple(range(8)), kind="npu"),), source="c.yaml")


def load(tmp_path: Path, text: str = "") -> jobs.Job:
    (tmp_path / "job.yaml").write_text(text + LARGE)
    return jobs.load(tmp_path / "job.yaml")


def test_a_training_gets_the_time_for_a_step_and_a_save(tmp_path: Path) -> None:
    job = load(tmp_path)
    summary = job_check.check(job, NODES)
    assert summary is not None
    needed = summary.time.seconds + summary.checkpoints.seconds
    assert needed > 60
    assert with_grace(job, summary).grace >= 1.5 * needed


@pytest.mark.parametrize(("grace", "refused"), [("30", True), ("0", False), ("3600", False)])
def test_a_shorter_time_is_refused_and_none_is_a_choice(tmp_path: Path, grace: str, refused: bool) -> None:
    job = load(tmp_path, f"grace: {grace}")
    if refused:
        with pytest.raises(InputFaults, match="30 s are shorter than the step and the save after a stop"):
            job_check.check(job, NODES)
    else:
        summary = job_check.check(job, NODES)
        assert with_grace(job, summary).grace == float(grace)


def test_slurm_signals_early_enough(tmp_path: Path, command_line: Run) -> None:
    load(tmp_path, "slurm: {nodes: 1, gres: 'npu:8'}")
    code, out, err = command_line("submit", "slurm", "job.yaml", "--print")
    assert code == 0, err
    line = next(line for line in out.splitlines() if "--signal" in line)
    summary = job_check.check(load(tmp_path), NODES)
    assert summary is not None
    assert int(line.rpartition("@")[2]) > last_save_seconds(summary)


def test_a_stop_says_what_a_grace_that_is_too_short_would_lose() -> None:
    progress = TrainProgress()
    assert stop_cost(progress, 30.0) == ""
    progress.checkpoints.append(Metric(kind="checkpoint", step=300, facts={"seconds": 205.0}))
    progress.last = Metric(kind="step", step=312)
    progress.step_seconds = 182.0
    assert stop_cost(progress, 30.0) == (
        "30 s are too short for a step and a save (6m27s): 12 steps lost since the checkpoint of step 300"
    )
    assert stop_cost(progress, 600.0) == ""


def test_a_second_stop_shortens_a_long_grace(tmp_path: Path, connections: Connections) -> None:
    text = "import signal, time; signal.signal(15, lambda *_: None); print('up', flush=True)\nwhile True: time.sleep(1)"
    run = launched(tmp_path, connections, program(text, grace=600.0))
    nodes = run.read_record().cluster.nodes
    homes = [Path(home) / "attempts" / "1" / "logs" for home in run.read_record().run_dirs.values()]
    wait_for(lambda: all("up" in path.read_text() for home in homes for path in home.glob("*.out")))
    with Connections(connections.transport) as others:
        import threading

        first = threading.Thread(target=send_stop, args=(others, nodes, run, StopRequest(600.0)), daemon=True)
        first.start()
        time.sleep(1.0)
        assert left_of(run) > 0
        outcomes = send_stop(connections, nodes, run, StopRequest(0.0))
        assert [outcome.get() for outcome in outcomes] == [0, 0]
        first.join(20)
    assert left_of(run) == 0
