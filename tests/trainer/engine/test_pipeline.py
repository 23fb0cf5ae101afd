"""Stages of a pipeline as one: a resume to the last bit, a gradient that is not finite, what each of them holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from trainer.config.model import ModelConfig
from trainer.config.parts import ParallelConfig
from trainer.config.train_config import TrainConfig
from trainer.model.gpt import GPT
from trainer.parallel.pipeline import TIED

Ranks = Callable[..., Any]
Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]

FOUR_LAYERS = {"layers": 4, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 60}


def losses(lines: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pipeline_that_died_goes_on_to_the_last_bit(
    precision: str, tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read
) -> None:
    config = raw_config(
        model={**FOUR_LAYERS, "dropout": 0.1},
        parallel={"pipeline": 2, "interleave": 2},
        micro_batch=1,
        zero=1,
        precision=precision,
    )
    whole = run_ranks(4, config, tmp_path / "whole")
    assert [done.returncode for done in whole] == [0] * 4, whole[0].stderr
    died = run_ranks(4, config, tmp_path / "parts", CLUSTERCTL_FAULT="rank3:step6:exit7")
    assert died[3].returncode == 7
    resumed = run_ranks(4, config, tmp_path / "parts")
    assert [done.returncode for done in resumed] == [0] * 4, resumed[0].stderr
    assert metrics(tmp_path / "parts", "start")[1]["step"] == 4
    found = losses(metrics(tmp_path / "whole", "step"))
    assert len(found) == 8 and losses(metrics(tmp_path / "parts", "step")) == found
    assert found[8][0] < found[1][0]


def test_the_stages_hold_every_parameter_once_but_for_the_tied_table() -> None:
    parallel = ParallelConfig(pipeline=3, interleave=2, layers=(0, 2, 1, 1, 1, 2))
    config = TrainConfig(model=ModelConfig(**{**FOUR_LAYERS, "layers": 7}), parallel=parallel)
    ops = native.choose("cpu")
    with torch.device("meta"):
        whole = dict(GPT(config.model, ops).named_parameters())
        stages = [dict(GPT(config.model, ops, pieces=own).named_parameters()) for own in config.stages]
    assert sum(len(stage) for stage in stages) == len(whole) + 1
    for name, parameter in whole.items():
        holders = [stage for stage in stages if name in stage]
        assert len(holders) == (2 if name == TIED else 1)
        assert all(stage[name].shape == parameter.shape for stage in holders)
    assert [TIED in stage for stage in stages] == [True, False, True]
