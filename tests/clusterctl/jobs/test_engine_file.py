"""A job that names a file of DeepSpeed's settings: its content is sent, and faults name its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job, job_check

JOB = """train:
  model: gpt-tiny
  data: {prefix: x}
  steps: 3
  global_batch: 16
  micro_batch: 4
  engine: {deepspeed: ds.json}
"""


def written(folder: Path, settings: str) -> Path:
    (folder / "ds.json").write_text(settings)
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path


def test_the_content_of_the_file_is_part_of_the_job(tmp_path: Path) -> None:
    loaded = job.load(written(tmp_path, '{"zero_optimization": {"stage": 1}}'))
    assert loaded.train is not None
    assert loaded.train["engine"] == {"deepspeed": {"zero_optimization": {"stage": 1}}}
    cluster = Cluster("lab", (Node("a", "a", "a", devices=(0, 1)),))
    summary = job_check.check(loaded, cluster)
    assert summary is not None and summary.zero == 1


def test_a_contradiction_names_the_line_of_the_file(tmp_path: Path) -> None:
    loaded = job.load(
        written(tmp_path, '{\n "train_batch_size": 8,\n "fp16": {\n  "enabled": true},\n "amp": {}\n}')
    )
    with pytest.raises(InputFaults) as caught:
        job_check.check(loaded, Cluster("lab", (Node("a", "a", "a", devices=(0, 1)),)))
    said = str(caught.value)
    assert f"{tmp_path}/ds.json:2 train_batch_size: is 8, and the job's global_batch is 16" in said
    assert f"{tmp_path}/ds.json:5 amp: is not supported here" in said


def test_a_file_that_is_missing_or_no_mapping_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "[1]")
    with pytest.raises(InputFaults, match=r"ds\.json: is not a mapping"):
        job.load(path)
    (tmp_path / "ds.json").unlink()
    with pytest.raises(UsageError, match="no such file"):
        job.load(path)
