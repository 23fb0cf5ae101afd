"""Short samples first: lengths as DeepSpeed's scheduler gives them, tokens, faults, and the course of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.curriculum import CurriculumConfig
from trainer.plan.resolve import plan_config, read_config
from trainer.plan.summary import summary


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "root"), [("linear", 2.0), ("root", 2.0), ("root", 3.0)])
def test_lengths_are_those_of_deepspeed(schedule: str, root: float) -> None:
    scheduler = pytest.importorskip(
        "deepspeed.runtime.data_pipeline.curriculum_scheduler", reason="deepspeed is not installed"
    )
    own = CurriculumConfig(start=16, steps=50, schedule=schedule, root=root, multiple=8)
    given = {"total_curriculum_step": 50, "difficulty_step": 8}
    given |= {"root_degree": int(root)} if schedule == "root" else {}
    theirs = scheduler.CurriculumScheduler(
        {
            "curriculum_type": "seqlen",
            "min_difficulty": 16,
            "max_difficulty": 128,
            "schedule_type": f"fixed_{schedule}",
            "schedule_config": given,
        }
    )
    lengths = [own.length(step, 128) for step in range(1, 61)]
    assert lengths == [theirs.update_difficulty(step) for step in range(1, 61)]
    assert lengths[0] == (16 if schedule == "linear" else lengths[0]) and lengths[-1] == 128


CURRICULUM = {"start": 4, "steps": 6, "multiple": 4}


@pytest.mark.slow
def test_a_training_reads_short_samples_first(
    tmp_path: Path, train_here: Callable[..., Any], metrics: Callable[..., list[dict[str, Any]]]
) -> None:
    train_here(tmp_path / "run", curriculum=CURRICULUM)
    own = CurriculumConfig(**CURRICULUM)
    tokens = 0
    for line in metrics(tmp_path / "run", "step"):
        tokens += 8 * own.length(line["step"], 16)
        assert line["tokens"] == tokens
    assert [own.length(step, 16) for step in range(1, 9)] == [4, 8, 8, 12, 12, 16, 16, 16]
    # A resume finds the same lengths.
    train_here(tmp_path / "parts", curriculum=CURRICULUM, stop_after=3)
    train_here(tmp_path / "parts", curriculum=CURRICULUM)
    losses = [
        {line["step"]: line["loss"] for line in metrics(tmp_path / run, "step")} for run in ("run", "parts")
    ]
    assert losses[0] == losses[1]
    train_here(tmp_path / "plain")
    assert losses[0][8] != metrics(tmp_path / "plain", "step")[-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"parallel": {"tensor": 2, "sequence": True}}, {"parallel": {"context": 2}}]
)
def test_two_ranks_learn_what_one_learns(
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    train_here: Callable[..., Any],
    run_ranks: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
    layout: dict[str, Any],
) -> None:
    train_here(tmp_path / "one", curriculum=CURRICULUM, steps=4)
    config = raw_config(curriculum=CURRICULUM, steps=4, **layout)
    done = run_ranks(2, config, tmp_path / "two")
    assert all(rank.returncode == 0 for rank in done), done[0].stderr
    losses = [[line["loss"] for line in metrics(tmp_path / run, "step")] for run in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_plan_counts_the_tokens_that_are_read(raw_config: Callable[..., dict[str, Any]]) -> None:
    config = read_config(raw_config(curriculum=CURRICULUM))
    assert summary(config, 1).tokens_total == config.tokens(8) == 8 * (4 + 8 + 8 + 12 + 12 + 16 + 16 + 16)
    assert read_config(raw_config()).tokens(8) == 8 * 8 * 16


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"curriculum": {"start": 8}}, "train.curriculum.steps"),
        ({"curriculum": {"start": 24, "steps": 4}}, "train.curriculum.start"),
        ({"curriculum": {"start": 4, "steps": 4}}, "train.curriculum.start"),
        ({"curriculum": {**CURRICULUM, "root": 3}}, "train.curriculum.root"),
        ({"curriculum": {"start": 3, "steps": 4, "multiple": 3}}, "train.curriculum.multiple"),
        ({"curriculum": CURRICULUM, "model": {"kind": "glm", "sequence": 16}}, "train.curriculum"),
    ],
)
def test_a_curriculum_that_does_not_fit_is_refused(
    raw_config: Callable[..., dict[str, Any]], changes: dict[str, Any], key: str
) -> None:
    faults = plan_config(raw_config(**changes), 1).faults
    assert key in [fault.key for fault in faults], faults
