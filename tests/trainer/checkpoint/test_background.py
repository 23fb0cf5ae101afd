"""Saves while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.checkpoint.checkpointer as checkpointer
from tests.support.checkpoints import parts_by_rows, state_at
from trainer.checkpoint.background import Staging
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.store import found, verify
from trainer.errors import TrainingFailed

TrainHere = Callable[..., Any]
Read = Callable[..., list[dict[str, Any]]]


def test_copies_do_not_change_with_the_training_and_their_memory_is_reused() -> None:
    staging, places = Staging("cpu"), []
    for step in (1, 2):
        state = state_at(step)
        # A part of the columns alone is no neighbouring memory.
        parts = [*parts_by_rows(state, 0, 1), *parts_by_rows({"a.weight": state["a.weight"].T}, 1, 2)]
        copies = staging.copy(parts)
        for tensor in state.values():
            tensor.zero_()
        expected = state_at(step)
        assert all(torch.equal(copy.tensor, expected[copy.key]) for copy in copies[:-1])
        assert torch.equal(copies[-1].tensor, expected["a.weight"].T[3:])
        places.append([copy.tensor.data_ptr() for copy in copies])
    assert places[0] == places[1]


def test_a_save_in_the_background_writes_the_same_files(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    kept = []
    for background in ("always", "never"):
        train_here(tmp_path / background, save={"every": 2, "keep": 9, "background": background})
        paths = found(tmp_path / background / "checkpoints")
        assert [verify(path).step for path in paths] == [8, 6, 4, 2]
        kept.append([read_manifest(path).files for path in paths])
        saved = metrics(tmp_path / background, "checkpoint")
        # The last one is awaited in any case.
        assert [line["background"] for line in saved] == [background == "always"] * 3 + [False]
        assert [line["step"] for line in saved] == [2, 4, 6, 8]
        assert all(0 < line["stall"] <= line["seconds"] for line in saved)
    assert kept[0] == kept[1]


@pytest.fixture
def slow_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpointer.save_parts

    def save_slowly(*arguments: Any, **named: Any) -> int:
        time.sleep(0.3)
        return save(*arguments, **named)

    monkeypatch.setattr(checkpointer, "save_parts", save_slowly)


@pytest.mark.usefixtures("slow_saves")
@pytest.mark.parametrize("busy", ["wait", "skip"])
def test_a_second_save_waits_for_the_first_or_is_skipped(
    tmp_path: Path, train_here: TrainHere, metrics: Read, busy: str
) -> None:
    save = {"every": 1, "keep": 9, "background": "always", "busy": busy}
    train_here(tmp_path, save=save, eval={"batches": 0})
    saved = [line["step"] for line in metrics(tmp_path, "checkpoint")]
    skipped = [(line["step"], line["writing"]) for line in metrics(tmp_path, "checkpoint_skipped")]
    assert saved[0] == 1 and saved[-1] == 8
    assert sorted([*saved, *(step for step, _ in skipped)]) == list(range(1, 9))
    assert (busy == "wait") == (not skipped)
    assert all(writing in saved and writing < step for step, writing in skipped)


@pytest.mark.usefixtures("slow_saves")
def test_a_stop_waits_for_the_save_in_progress_and_saves_last(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    train_here(tmp_path, stop_after=3, save={"every": 2, "keep": 9, "background": "always"})
    assert [line["step"] for line in metrics(tmp_path, "checkpoint")] == [2, 3]
    assert metrics(tmp_path)[-1]["event"] == "stopped"


def test_a_failure_in_the_background_ends_the_training_with_path_and_remedy(
    tmp_path: Path, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpointer.save_parts

    def fail_second(order: Any, *rest: Any, **named: Any) -> int:
        if order.manifest.step == 4:
            raise TrainingFailed(f"{tmp_path}/step-00000004: cannot be saved: No space left", "make room")
        return save(order, *rest, **named)

    monkeypatch.setattr(checkpointer, "save_parts", fail_second)
    with pytest.raises(TrainingFailed, match="step-00000004: cannot be saved") as caught:
        train_here(tmp_path, save={"every": 2, "keep": 9, "background": "always"})
    assert caught.value.hint == "make room"
    assert [path.name for path in found(tmp_path / "checkpoints")] == ["step-00000002"]


def test_weights_alone_are_saved_and_no_training_resumes_from_them(
    tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    train_here(tmp_path, save={"state": "weights"})
    checkpoint = verify(tmp_path / "checkpoints" / "step-00000008")
    assert set(checkpoint.table) == set(checkpoint.weights) and checkpoint.bytes < 150_000
    train_here(tmp_path, stop_after=1)
    start = metrics(tmp_path, "start")[1]
    assert start["step"] == 0 and "holds weights alone" in start["notes"][0]
