"""One rank in this process: the loop, resume, evaluation, generation."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native import products
from native.registry import OPS
from trainer.corpus.indexed import Writer
from trainer.errors import CheckpointError, DataError, InputError, TrainingFailed
from trainer.samples import dataset

TrainHere = Callable[..., Any]
Read = Callable[..., list[dict[str, Any]]]


def losses(lines: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def test_the_loss_falls_and_every_event_is_told(tmp_path: Path, train_here: TrainHere, metrics: Read) -> None:
    ended = train_here(tmp_path, steps=40, save={"every": 20, "keep": 1})
    evals = metrics(tmp_path, "eval")
    assert [line["step"] for line in evals] == [0, *range(4, 41, 4)]
    assert evals[0]["loss"] == pytest.approx(math.log(60), abs=0.1)
    assert ended.eval_loss == evals[-1]["loss"] < evals[0]["loss"] - 0.3
    assert [line["step"] for line in metrics(tmp_path, "checkpoint")] == [20, 40]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["latest", "step-00000040"]
    start, end = metrics(tmp_path)[0], metrics(tmp_path)[-1]
    assert (start["event"], end["event"], end["step"]) == ("start", "end", 40)
    assert {one["op"] for one in start["native"]} == set(OPS)
    assert metrics(tmp_path, "step")[-1]["tokens"] == 40 * 8 * 16
    beat = (tmp_path / "heartbeat" / "rank-0").read_text()
    # The last checkpoint followed.
    assert re.fullmatch(r"40 +0\.\d{4}\npause", beat)
    steps = metrics(tmp_path, "step")
    assert all(0 < one["own_seconds"] <= one["step_seconds"] for one in steps)


def test_the_same_seed_gives_the_same_losses_to_the_last_bit(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    for name in ("a", "b"):
        train_here(tmp_path / name)
    assert losses(metrics(tmp_path / "a", "step")) == losses(metrics(tmp_path / "b", "step"))


def test_stopped_and_resumed_losses_are_those_of_one_run(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    model = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 60, "dropout": 0.2}
    train_here(tmp_path / "whole", model=model)
    stopped = train_here(tmp_path / "parts", model=model, stop_after=3)
    assert stopped.stopped and stopped.step == 3
    assert metrics(tmp_path / "parts")[-1]["event"] == "stopped"
    train_here(tmp_path / "parts", model=model)
    assert metrics(tmp_path / "parts", "start")[1]["resumed_from"].endswith("step-00000003")
    assert losses(metrics(tmp_path / "parts", "step")) == losses(metrics(tmp_path / "whole", "step"))
    assert len(metrics(tmp_path / "parts", "step")) == 8


def test_accumulation_gives_the_losses_of_one_large_batch(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    for micro in (1, 8):
        train_here(tmp_path / str(micro), micro_batch=micro)
    for one, eight in zip(metrics(tmp_path / "1", "step"), metrics(tmp_path / "8", "step"), strict=True):
        assert one["loss"] == pytest.approx(eight["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(eight["grad_norm"], rel=1e-4)


def test_bf16_follows_fp32(tmp_path: Path, train_here: TrainHere, metrics: Read) -> None:
    for precision in ("fp32", "bf16"):
        train_here(tmp_path / precision, precision=precision, steps=20)
    pairs = zip(metrics(tmp_path / "fp32", "step"), metrics(tmp_path / "bf16", "step"), strict=True)
    differences = [abs(one["loss"] - two["loss"]) for one, two in pairs]
    assert 0 < max(differences) < 0.03


def test_a_damaged_checkpoint_is_passed_over_and_said(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    train_here(tmp_path)
    file = tmp_path / "checkpoints" / "step-00000008" / "part-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    train_here(tmp_path)
    start = metrics(tmp_path, "start")[1]
    assert start["step"] == 4 and "step-00000008" in start["notes"][0]


def test_a_finished_run_is_not_trained_again(tmp_path: Path, train_here: TrainHere, metrics: Read) -> None:
    train_here(tmp_path)
    assert train_here(tmp_path).step == 8
    assert len(metrics(tmp_path, "step")) == 8


def test_another_model_or_other_data_is_refused(tmp_path: Path, train_here: TrainHere) -> None:
    train_here(tmp_path / "run")
    with Writer(tmp_path / "other", np.uint16) as writer:
        for _ in range(20):
            writer.add_document([list(range(50))])
    with pytest.raises(CheckpointError) as caught:
        train_here(
            tmp_path / "run",
            model={"layers": 1, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 60},
            data={"prefix": str(tmp_path / "other"), "split": "80,20,0"},
            global_batch=4,
        )
    message = caught.value.message
    for words in ("layers was 2 and is 1", "not what it was trained on", "global_batch was 8"):
        assert words in message


def test_resume_can_name_a_checkpoint_or_be_forbidden(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    train_here(tmp_path / "a")
    train_here(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoints" / "step-00000004"))
    train_here(tmp_path / "a", resume="never")
    assert metrics(tmp_path / "b", "start")[0]["step"] == 4
    assert metrics(tmp_path / "a", "start")[1]["step"] == 0
    with pytest.raises(CheckpointError, match="nowhere"):
        train_here(tmp_path / "c", resume=str(tmp_path / "nowhere"))


def test_other_settings_at_a_resume_are_noted(tmp_path: Path, train_here: TrainHere, metrics: Read) -> None:
    train_here(tmp_path, stop_after=2)
    train_here(tmp_path, optimizer={"lr": 1e-4})
    assert any("optimizer was" in note for note in metrics(tmp_path, "start")[1]["notes"])


def test_a_resume_notes_parts_that_begin_elsewhere(
    tmp_path: Path, train_here: TrainHere, metrics: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        # As a Python or a version whose rounding differs.
        other.setattr(dataset, "split_bounds", lambda split, n: [(0, n - 9), (n - 9, n - 1), (n - 1, n)])
        train_here(tmp_path, stop_after=2)
    train_here(tmp_path, stop_after=3)
    train_here(tmp_path, stop_after=4)
    _, second, third = (" ".join(line["notes"]) for line in metrics(tmp_path, "start"))
    assert "order of samples was" in second and "order of samples" not in third


def test_a_loss_that_is_not_finite_ends_the_training_in_words(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    with pytest.raises(TrainingFailed, match="no finite loss"):
        train_here(tmp_path, steps=60, optimizer={"lr": 1e30, "clip": 0.0}, save={"every": 0})
    assert metrics(tmp_path, "step")[-1]["skipped"]


def test_ids_that_the_model_lacks_are_refused_before_training(tmp_path: Path, train_here: TrainHere) -> None:
    with pytest.raises(DataError, match=r"has token id 59, but train\.model\.vocab is 50"):
        train_here(tmp_path, model={"layers": 1, "hidden": 8, "heads": 1, "sequence": 16, "vocab": 50})


def test_a_backend_that_is_not_there_is_refused(tmp_path: Path, train_here: TrainHere) -> None:
    with pytest.raises(InputError, match=r"train\.native: "):
        train_here(tmp_path, native="nonsense")


def test_a_job_can_choose_torchs_products(
    tmp_path: Path, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("native.cpu.linear")
    asked = []

    def serves(*matrices: object) -> bool:
        asked.append(matrices)
        return False

    monkeypatch.setattr(products, "_offered", [replace(products._offered[0], serves=serves)])
    train_here(tmp_path / "torch", native={"linear": "reference"}, steps=4)
    assert not asked
    train_here(tmp_path / "ours", steps=4)
    assert asked


def test_the_checkpoint_holds_the_logical_model_only(tmp_path: Path, train_here: TrainHere) -> None:
    from trainer.checkpoint.store import verify

    train_here(tmp_path)
    found = verify(tmp_path / "checkpoints" / "step-00000008")
    for key in ("tokens.weight", "exp_avg.tokens.weight"):
        assert found.table[key] == found.read([key])[key].shape == (60, 32)
    assert (found.manifest.consumed_samples, found.manifest.optimizer_steps) == (64, 8)
    assert found.manifest.config.steps == 8 and not found.manifest.faults
