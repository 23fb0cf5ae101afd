"""What a job file says, and where its keys belong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.jobs.job import TRAIN_KEYS, load
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
