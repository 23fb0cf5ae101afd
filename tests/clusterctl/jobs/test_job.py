"""What a job file says, and where its keys belong."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.jobs.job import LOG_LIMIT, TRAIN_KEYS, from_command, load
from trainer.config.train_config import TrainConfig


def test_a_key_of_train_at_the_top_is_shown_its_place(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nengine: deepspeed\nsteps: 5\ntrain: {model: tiny}\n")
    with pytest.raises(InputFaults) as caught:
        load(tmp_path / "job.yaml")
    remedies = {fault.what: fault.remedy for fault in caught.value.faults}
    assert remedies["unknown key 'engine'"] == "`engine:` belongs under `train:`"
    assert remedies["unknown key 'steps'"] == "`steps:` belongs under `train:`"


def test_the_keys_that_belong_under_train_are_keys_of_the_trainer() -> None:
    assert set(TRAIN_KEYS) <= {field.name for field in fields(TrainConfig)}


@pytest.mark.parametrize(
    ("text", "limit"), [("", LOG_LIMIT), ("log_limit: 2GB", 2_000_000_000), ("log_limit: off", 0)]
)
def test_the_size_of_logs_is_read(tmp_path: Path, text: str, limit: int) -> None:
    (tmp_path / "job.yaml").write_text(f"command: [a]\n{text}\n")
    assert load(tmp_path / "job.yaml").log_limit == limit


@pytest.mark.parametrize("text", ["5MB", "5", "many", "-1GB"])
def test_a_size_of_logs_that_loses_lines_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(f"command: [a]\nlog_limit: {text}\n")
    with pytest.raises(InputFaults, match="no size of at least 16 MB"):
        load(tmp_path / "job.yaml")


@pytest.mark.parametrize("name", ["训练-1", "naïve.run", "Ж", "a_b"])
def test_a_name_may_have_letters_of_any_script(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").write_text(f"name: {name}\ncommand: [sleep]\n", "utf-8")
    assert load(tmp_path / "job.yaml").name == name


def test_the_program_last_does_not_name_its_runs() -> None:
    assert from_command(["last", "-n", "3"], None).name == "command"


@pytest.mark.parametrize("name", ["a/b", "..", "-a", "a b", "中" * 42, "a\u202eb", "_x", "last"])
def test_a_name_that_no_folder_should_have_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({"name": name, "command": ["true"]}), "utf-8")
    with pytest.raises(InputFaults, match="not a name for the folder of a run"):
        load(tmp_path / "job.yaml")
