"""fp16 in every engine, ZeRO stage and pipeline: losses near fp32, and an overflow skips the step on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.config.layout import accumulation

Make = Callable[..., dict[str, Any]]
Ranks = Callable[..., Any]
Read = Callable[..., list[dict[str, Any]]]

# Small: a CPU multiplies fp16 at a tenth of fp32's rate, or less. The second tensor parallel rank has tokens too.
MODEL = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 300}
STEPS = 25
# No step overflows at this scale, so that fp16 and fp32 make the same updates.
LOSS_SCALE = {"initial": 4096.0}
NONE: Mapping[str, str] = {}

slow = pytest.mark.slow
LAYOUTS = [
    *(pytest.param(2, {"zero": zero}, id=f"torch-zero{zero}") for zero in range(4)),
    pytest.param(2, {"parallel": {"tensor": 2, "sequence": True}}, id="torch-tensor2-sequence"),
    pytest.param(2, {"parallel": {"pipeline": 2}}, id="torch-pipeline2"),
    pytest.param(4, {"parallel": {"pipeline": 2}, "zero": 2}, id="torch-2x2-pipeline-zero2"),
    *(
        pytest.param(2, {"engine": "deepspeed", "zero": zero}, id=f"deepspeed-zero{zero}", marks=slow)
        for zero in range(4)
    ),
    pytest.param(
        2, {"engine": "deepspeed", "parallel": {"pipeline": 2}}, id="deepspeed-pipeline2", marks=slow
    ),
    pytest.param(
        4,
        {"engine": "deepspeed", "parallel": {"pipeline": 2}, "zero": 1},
        id="deepspeed-2x2-pipeline-zero1",
        marks=slow,
    ),
    pytest.param(
        2, {"engine": "deepspeed", "zero": 2, "offload": True}, id="deepspeed-zero2-offload", marks=slow
    ),
]


@pytest.fixture
def train(tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read) -> Callable[..., Any]:
    """Train with some ranks; return the metrics of each step."""

    def run(ranks: int, environment: Mapping[str, str] = NONE, **changes: Any) -> list[dict[str, Any]]:
        if changes.get("engine") == "deepspeed":
            pytest.importorskip("deepspeed")
        folder = tmp_path / changes.get("precision", "fp16")
        schedule = {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 5}
        config = raw_config(
            **{"model": MODEL, "optimizer": schedule, "eval": {"batches": 1}, "save": {"every": 0}, **changes}
        )
        done = run_ranks(ranks, config, folder, **environment)
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
        return metrics(folder, "step")

    return run


@pytest.mark.parametrize(("ranks", "changes"), LAYOUTS)
def test_losses_stay_near_those_of_fp32(
    ranks: int,
    changes: dict[str, Any],
    train: Callable[..., Any],
    train_here: Callable[..., Any],
    tmp_path: Path,
    metrics: Read,
) -> None:
    half = train(ranks, steps=STEPS, precision="fp16", loss_scale=LOSS_SCALE, **changes)
    full = train(1, steps=STEPS, precision="fp32")
    assert not any(line["skipped"] for line in half)
    assert {line["loss_scale"] for line in half} == {4096.0}
    differences = [abs(one["loss"] - two["loss"]) for one, two in zip(half, full, strict=True)]
    assert len(differences) == STEPS and 0 < max(differences) < 1e-2
    assert [line["grad_norm"] for line in half] == pytest.approx(
        [line["grad_norm"] for line in full], rel=5e-2
    )
    assert full[-1]["loss"] < full[0]["loss"] - 0.5


@pytest.mark.parametrize(("ranks", "changes"), LAYOUTS)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale_by_its_hysteresis(
    ranks: int, changes: dict[str, Any], train: Callable[..., Any], metrics: Read, tmp_path: Path
) -> None:
    parallel = changes.get("parallel", {})
    micros = accumulation(8, 2, ranks // (parallel.get("tensor", 1) * parallel.get("pipeline", 1)))
    overflows = (2, 3, 5)
    # The last micro-batch of these steps, on the last rank alone.
    forwards = ",".join(str(step * micros) for step in overflows)
    lines = train(
        ranks,
        {"TEST_OVERFLOW_RANK": str(ranks - 1), "TEST_OVERFLOW_FORWARDS": forwards},
        precision="fp16",
        loss_scale={"initial": 4096.0, "hysteresis": 2, "window": 3},
        eval={"every": 1, "batches": 1},
        **changes,
    )
    assert [line["step"] for line in lines if line["skipped"]] == list(overflows)
    assert [line["calibrating"] for line in lines] == [line["skipped"] for line in lines]
    # The first overflow is let pass, each further one halves; three clean steps double.
    assert [line["loss_scale"] for line in lines] == [4096.0] * 3 + [2048.0] * 2 + [1024.0] * 3
    # An evaluation passes through every rank's part of the model: none of them has changed.
    evaluated = [line["loss"] for line in metrics(tmp_path / "fp16", "eval")]
    unchanged = [step for step in range(1, 9) if evaluated[step] == evaluated[step - 1]]
    assert len(evaluated) == 9 and unchanged == list(overflows)
