from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.amounts import BatchSizes

RAMP = {"start": 4, "increment": 2, "samples": 40}


def megatron(consumed: int, start: int, increment: int, samples: int, whole: int) -> int:
    """Its rampup-batch-size, as its documents tell it."""
    each = samples / ((whole - start) / increment)
    return whole if consumed > samples else start + int(consumed / each) * increment


@pytest.mark.parametrize(
    ("start", "increment", "samples", "whole"),
    [(4, 2, 40, 8), (32, 32, 5_859_375, 1536), (16, 8, 300_000, 192), (4, 4, 3, 64), (8, 8, 100, 8)],
)
def test_a_ramp_rises_where_megatrons_does(start: int, increment: int, samples: int, whole: int) -> None:
    sizes = BatchSizes(whole, start, increment, samples)
    consumed = step = 0
    while consumed < min(samples + 3 * whole, 200 * whole):
        expected = megatron(consumed, start, increment, samples, whole) if whole > start else whole
        assert (sizes.after(consumed), sizes.consumed(step)) == (expected, consumed)
        step, consumed = step + 1, consumed + expected
        assert sizes.of(step) == expected
        assert sizes.in_steps(consumed) == step


def test_without_a_ramp_every_step_has_the_whole_batch() -> None:
    sizes = BatchSizes(192)
    assert (sizes.consumed(10**6), sizes.of(1), sizes.ramp_steps) == (192 * 10**6, 192, 0)
    # 5 of 4, 4 of 6.
    assert BatchSizes(8, 4, 2, 40).ramp_steps == 9


@pytest.mark.slow
def test_a_ramp_is_the_same_training_on_two_ranks_and_after_a_resume(
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    train_here: Callable[..., Any],
    run_ranks: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
) -> None:
    changes: dict[str, Any] = {
        "steps": 12,
        "batch_ramp": RAMP,
        "optimizer": {"lr": 1e-2, "warmup": "20 samples"},
    }
    train_here(tmp_path / "one", **changes)
    one = metrics(tmp_path / "one", "step")
    assert [line["samples"] for line in one] == [4] * 5 + [6] * 4 + [8] * 3
    assert one[-1]["tokens"] == (5 * 4 + 4 * 6 + 3 * 8) * 16
    assert one[-1]["lr"] == 0.0 and one[4]["lr"] == 1e-2
    config = raw_config(**{**changes, "micro_batch": 1})
    died = run_ranks(2, config, tmp_path / "two", CLUSTERCTL_FAULT="rank1:step7:exit7")
    assert died[1].returncode == 7
    done = run_ranks(2, config, tmp_path / "two")
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    assert metrics(tmp_path / "two", "start")[1]["step"] == 4
    two = {line["step"]: (line["loss"], line["lr"]) for line in metrics(tmp_path / "two", "step")}
    for line in one:
        assert two[line["step"]] == (pytest.approx(line["loss"], rel=1e-5), line["lr"])


@pytest.mark.parametrize(
    ("steps", "says"), [(12, "the first 9 steps have fewer than 8"), (6, "which has 6 of 8 samples")]
)
def test_a_plan_tells_what_a_ramp_means(
    raw_config: Callable[..., dict[str, Any]], steps: int, says: str
) -> None:
    from trainer.plan.summary import check

    raw = raw_config(steps=steps, batch_ramp=RAMP, optimizer={})
    summary = check({"train": raw, "world_size": 1})["summary"]
    assert any(says in note for note in summary["notes"])
    assert summary["tokens_total"] == BatchSizes(8, 4, 2, 40).consumed(steps) * 16
