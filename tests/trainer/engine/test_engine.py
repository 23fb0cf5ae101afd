"""Several ranks over loopback: both engines give the losses of one process, and go on after a death."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., Any]
Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]
TrainHere = Callable[..., Any]

ENGINES = [
    pytest.param("torch", 0, id="torch"),
    pytest.param("torch", 1, id="torch-zero1"),
    pytest.param("torch", 2, id="torch-zero2"),
    pytest.param("torch", 3, id="torch-zero3"),
    pytest.param("deepspeed", 0, id="deepspeed", marks=pytest.mark.slow),
    pytest.param("deepspeed", 1, id="deepspeed-zero1", marks=pytest.mark.slow),
]


def losses(lines: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@pytest.mark.parametrize(("engine", "zero"), ENGINES)
def test_two_ranks_give_the_losses_of_one_and_a_death_changes_nothing(
    engine: str,
    zero: int,
    tmp_path: Path,
    raw_config: Make,
    run_ranks: Ranks,
    metrics: Read,
    train_here: TrainHere,
) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    train_here(tmp_path / "one")
    config = raw_config(engine=engine, zero=zero)
    whole = run_ranks(2, config, tmp_path / "whole")
    assert [done.returncode for done in whole] == [0, 0], whole[0].stderr
    died = run_ranks(2, config, tmp_path / "parts", CLUSTERCTL_FAULT="rank1:step6:kill9")
    assert died[1].returncode == -signal.SIGKILL and died[0].returncode == 1
    resumed = run_ranks(2, config, tmp_path / "parts")
    assert [done.returncode for done in resumed] == [0, 0], resumed[0].stderr
    assert metrics(tmp_path / "parts", "start")[1]["step"] == 4

    one, two = losses(metrics(tmp_path / "one", "step")), losses(metrics(tmp_path / "whole", "step"))
    assert one.keys() == two.keys()
    for step in one:
        # The averaging of the gradient over ranks is part of the norm, so both are held.
        assert two[step] == (pytest.approx(one[step][0], rel=1e-5), pytest.approx(one[step][1], rel=1e-4))
    assert losses(metrics(tmp_path / "parts", "step")) == two
    evals = [[line["loss"] for line in metrics(tmp_path / name, "eval")] for name in ("one", "whole")]
    assert evals[1] == pytest.approx(evals[0], rel=1e-5)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(
    tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read, train_here: TrainHere
) -> None:
    train_here(tmp_path / "one")
    config = raw_config(zero=1)
    died = run_ranks(2, config, tmp_path / "parts", CLUSTERCTL_FAULT="rank0:step5:exit7")
    assert died[0].returncode == 7
    train_here(tmp_path / "parts")
    one, parts = losses(metrics(tmp_path / "one", "step")), losses(metrics(tmp_path / "parts", "step"))
    assert metrics(tmp_path / "parts", "start")[1]["world"] == 1
    for step in range(1, 9):
        assert parts[step][0] == pytest.approx(one[step][0], rel=1e-5)


def test_a_crash_leaves_its_traceback_in_the_log_and_a_mistake_does_not(
    tmp_path: Path, raw_config: Make, run_ranks: Ranks
) -> None:
    (crashed,) = run_ranks(1, raw_config(), tmp_path / "a", CLUSTERCTL_FAULT="rank0:step2:raise")
    assert crashed.returncode == 1
    assert "Traceback" in crashed.stderr and "drill: arranged at step 2" in crashed.stderr
    (mistaken,) = run_ranks(1, raw_config(data={"prefix": str(tmp_path / "none")}), tmp_path / "b")
    assert mistaken.returncode == 2 and "Traceback" not in mistaken.stderr
    assert mistaken.stderr.startswith("error: ") and "  try: " in mistaken.stderr


def test_holes_of_the_start_are_returned_once_after_the_first_step(
    tmp_path: Path, train_here: TrainHere, metrics: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned_at: list[int] = []

    def note() -> None:
        returned_at.append(len(metrics(tmp_path / "run", "step")))

    monkeypatch.setattr("trainer.engine.torch_engine.return_unused_memory", note)
    train_here(tmp_path / "run", steps=3)
    # The first step is written down when it is complete.
    assert returned_at == [0]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_waiting_for_a_slow_rank_is_not_the_own_time_of_others(
    zero: int,
    tmp_path: Path,
    raw_config: Callable[..., Any],
    run_ranks: Callable[..., Any],
    metrics: Callable[..., Any],
) -> None:
    config = raw_config(
        zero=zero, steps=6, global_batch=8, micro_batch=2, eval={"batches": 0}, save={"every": 0}
    )
    done = run_ranks(2, config, tmp_path / "run", CLUSTERCTL_FAULT="rank1:step2:slow400")
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    for step in metrics(tmp_path / "run", "step")[2:]:
        assert step["step_seconds"] > 0.4 and step["own_seconds"] < step["step_seconds"] - 0.3, step
