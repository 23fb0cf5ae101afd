from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trainer.config.amounts import BatchSizes, amount, amount_text
from trainer.config.parts import OptimizerConfig
from trainer.engine.optimizer import bounds, learning_rate


def rates(schedule: str, warmup: int = 2, steps: int = 6, **more: Any) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, schedule=schedule, warmup_steps=warmup, **more)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def test_the_rate_rises_over_the_warm_up_and_ends_at_the_least() -> None:
    assert rates("linear") == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates("constant") == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    cosine = rates("cosine")
    assert cosine[:2] == pytest.approx([0.5, 1.0])
    assert (cosine[3], cosine[-1]) == (pytest.approx(0.6), pytest.approx(0.2))


def test_without_warm_up_the_first_step_is_already_on_the_way_down() -> None:
    assert rates("linear", warmup=0, steps=4) == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_wsd_stays_high_and_falls_in_its_last_part() -> None:
    assert rates("wsd", steps=10, wsd_decay=0.4) == pytest.approx([0.5] + [1.0] * 5 + [0.8, 0.6, 0.4, 0.2])


def test_the_rate_stays_at_its_least_after_a_decay_shorter_than_the_training() -> None:
    assert rates("linear", warmup=0, steps=6, decay="4 steps")[3:] == pytest.approx([0.2] * 3)
    assert rates("wsd", warmup=0, steps=6, decay="4 steps")[3:] == pytest.approx([0.2] * 3)


def test_polynomial_falls_by_a_power_and_exponential_by_a_factor() -> None:
    assert rates("polynomial", warmup=0, steps=4) == rates("linear", warmup=0, steps=4)
    assert rates("polynomial", warmup=0, steps=4, power=2.0) == pytest.approx(
        [0.2 + 0.8 * left**2 for left in (0.75, 0.5, 0.25, 0.0)]
    )
    falls = rates("exponential", warmup=0, steps=4)
    assert [later / earlier for earlier, later in pairwise(falls)] == pytest.approx([0.2**0.25] * 3)
    assert falls[-1] == pytest.approx(0.2)


def test_a_schedule_in_tokens_is_the_same_as_one_in_steps() -> None:
    tokens = OptimizerConfig(warmup="25M tokens", decay="2.5B tokens")
    assert bounds(tokens, 10_000, BatchSizes(256), sequence=2048) == (
        pytest.approx(25e6 / 2048),
        pytest.approx(2.5e9 / 2048),
    )
    parts = OptimizerConfig(warmup="1%", decay="320000 steps")
    assert bounds(parts, 500_000, BatchSizes(16), sequence=1024) == (3200 * 16, 320_000 * 16)


def test_while_batches_are_small_the_rate_moves_as_much_slower() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup="16 samples")
    ramp = BatchSizes(8, start=4, increment=4, samples=16)
    assert [learning_rate(config, step, 8, ramp) for step in range(1, 9)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    )
    assert bounds(OptimizerConfig(warmup_steps=2, decay="6 steps"), 9, ramp) == (8, 32)


def rate_by_megatron(schedule: str, before: float, warmup: float, decay: float, falls: float) -> float:
    """Return the rate that Megatron gives a step, from the samples that all earlier steps consumed.

    Rates from 0 to 1, and down to 0.2; a step that begins at the end of the warm-up still belongs to it.
    """
    high, low = 1.0, 0.2
    if warmup and before <= warmup:
        return high * before / warmup
    if schedule == "constant":
        return high
    if before > decay:
        return low
    part = (before - warmup) / (decay - warmup)
    if schedule == "wsd":
        left = 1.0 if before <= decay - falls else 1.0 - (before - (decay - falls)) / falls
    else:
        left = 1.0 - part if schedule == "linear" else 0.5 * (math.cos(math.pi * part) + 1.0)
    return low + left * (high - low)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "wsd"])
@pytest.mark.parametrize("ramp", [BatchSizes(8), BatchSizes(8, start=4, increment=4, samples=16)])
def test_each_step_has_the_rate_that_megatron_gives_the_next_one(schedule: str, ramp: BatchSizes) -> None:
    config = OptimizerConfig(
        lr=1.0, min_lr=0.2, schedule=schedule, warmup="16 samples", decay="80 samples", wsd_decay=0.4
    )
    ours = [learning_rate(config, step, 20, ramp) for step in range(1, 21)]
    theirs = [
        rate_by_megatron(schedule, ramp.consumed(step - 1), warmup=16, decay=80, falls=32)
        for step in range(1, 22)
    ]
    assert theirs[0] == 0.0
    assert ours == pytest.approx(theirs[1:])
    assert ours != pytest.approx(theirs[:-1])


def test_the_settings_say_that_megatrons_rates_come_a_step_later() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "job.md"
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("| `optimizer.schedule`")]
    assert "Megatron uses each of these rates one step later" in line


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("700", (700, "steps")),
        ("3k samples", (3000, "samples")),
        ("2.5B tokens", (2.5e9, "tokens")),
        ("1e9 tokens", (1e9, "tokens")),
        ("375Mtokens", (375e6, "tokens")),
        ("1 step", (1, "steps")),
        ("1%", (0.01, "part")),
    ],
)
def test_an_amount_is_read_with_its_unit(text: str, meant: tuple[float, str]) -> None:
    assert amount(text) == meant


@pytest.mark.parametrize("raw", ["", 12, 0.01])
def test_an_amount_survives_being_written_again(raw: object) -> None:
    assert amount_text(amount_text(raw)) == amount_text(raw)


@pytest.mark.parametrize("raw", ["fast", "-3", "3 epochs", "120%", True, None, ["1"], "1e999", -4, 1.5e400])
def test_what_is_no_amount_is_refused_with_examples(raw: object) -> None:
    with pytest.raises(ValueError, match=r"tokens|whole"):
        amount_text(raw)
