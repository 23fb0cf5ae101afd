"""The batch file of a job, and the job's `slurm` part."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.backends.slurm.backend import BACKEND as slurm
from clusterctl.errors import InputFaults
from clusterctl.jobs import job as jobs
from clusterctl.jobs.parts.platforms import SlurmOptions
from clusterctl.jobs.run_folder import RunDir


def written(tmp_path: Path, part: str) -> jobs.Job:
    file = tmp_path / "job.yaml"
    file.write_text(f"command: [hostname]\nslurm: {part}\n")
    return jobs.load(file)


def test_the_options_of_a_job_become_lines_of_the_batch_file(tmp_path: Path) -> None:
    part = "{nodes: 2, gres: 'npu:8', time: 90, extra: [--mem=0], setup: [module load cann]}"
    run = RunDir(tmp_path / "demo-1")
    text = slurm.batch_file(run, written(tmp_path, part), ["python", "-m", "x", "a b"])
    lines = text.splitlines()
    assert f"#SBATCH --output={run.root}/slurm.log" in lines
    for line in ("--nodes=2", "--gres=npu:8", "--time=90", "--requeue", "--signal=B:USR1@120", "--mem=0"):
        assert f"#SBATCH {line}" in lines
    assert lines[-2:] == ["module load cann", "exec python -m x 'a b'"]


def test_a_job_that_must_not_be_requeued_says_so() -> None:
    lines = slurm.header("demo", SlurmOptions(requeue=False, signal=0), "log")
    assert "#SBATCH --no-requeue" in lines
    assert not any("--signal" in line for line in lines)


@pytest.mark.parametrize("gres", ["npu:8", "gpu:a100:4", "gpu", "gpu:2,nvme:1", "license"])
def test_devices_in_the_words_of_slurm(tmp_path: Path, gres: str) -> None:
    part = written(tmp_path, f"{{gres: '{gres}'}}").slurm
    assert part is not None and part.gres == gres


@pytest.mark.parametrize(
    ("gres", "text"), [("npu:x", "gives no number"), ("gpu:a100", "gives no number"), ("npu;8", "names no")]
)
def test_devices_without_a_number_are_refused(tmp_path: Path, gres: str, text: str) -> None:
    with pytest.raises(InputFaults, match=text):
        written(tmp_path, f"{{gres: '{gres}'}}")


def test_all_faults_of_the_part_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(InputFaults) as caught:
        written(tmp_path, "{nodes: 0, time: soon, partition: 'a b', extra: [mem], gress: x}")
    problems = "\n".join(fault.what for fault in caught.value.faults)
    for text in ("0 is too small", "'soon' is not a time", "'a b' is not one word", "'mem'", "'gress'"):
        assert text in problems
    assert all(":" in fault.where for fault in caught.value.faults)
