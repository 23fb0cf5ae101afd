"""A training that begins with the weights of another: the same loss, step 0, a new optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterctl.wire.requests import ExportRequest
from tests.trainer.conftest import MODEL
from trainer.checkpoint.store import open_checkpoint
from trainer.errors import ConfigFaults, TrainerError
from trainer.plan.summary import check
from trainer.weights.convert import export_weights

SOURCE = "train.init.source"
OPTIMIZER = {"lr": 1e-2, "min_lr": 1e-3}
Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]
TrainHere = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path, train_here: TrainHere) -> Path:
    """Return a run of eight steps."""
    train_here(tmp_path / "source")
    return tmp_path / "source"


def evaluations(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-00000008"])
def test_the_first_loss_is_that_of_the_weights(
    where: str, source: Path, tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    train_here(tmp_path / "next", init=str(source / where), steps=2, optimizer=OPTIMIZER)
    before, after = (evaluations(metrics(run, "eval")) for run in (source, tmp_path / "next"))
    assert after[0] == pytest.approx(before[-1], abs=1e-6) and after[0] < before[0] - 0.1
    (start,) = metrics(tmp_path / "next", "start")
    assert start["step"] == 0 and any("begins with the weights" in note for note in start["notes"])
    assert open_checkpoint(tmp_path / "next" / "checkpoints" / "step-00000002").manifest.optimizer_steps == 2


def test_a_resume_goes_on_from_its_own_checkpoint(
    source: Path, tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    train_here(tmp_path / "next", init=str(source), stop_after=5, steps=6)
    train_here(tmp_path / "next", init=str(source), steps=6)
    assert [start["step"] for start in metrics(tmp_path / "next", "start")] == [0, 5]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"parallel": {"tensor": 2}}),
        (2, {"zero": 3}),
        (2, {"parallel": {"pipeline": 2}, "precision": "bf16"}),
    ],
    ids=["tensor", "zero3", "pipeline-bf16"],
)
def test_every_layout_begins_with_them(
    ranks: int,
    changes: dict[str, Any],
    source: Path,
    tmp_path: Path,
    raw_config: Make,
    run_ranks: Callable[..., Any],
    metrics: Read,
) -> None:
    config = raw_config(init=str(source), steps=1, optimizer=OPTIMIZER, **changes)
    done = run_ranks(ranks, config, tmp_path / "next")
    assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
    before, after = (evaluations(metrics(run, "eval")) for run in (source, tmp_path / "next"))
    assert after[0] == pytest.approx(before[-1], rel=1e-5 if "precision" not in changes else 1e-2)


def test_weights_of_another_program_are_read_as_they_are(
    source: Path, tmp_path: Path, train_here: TrainHere, metrics: Read
) -> None:
    export_weights(source / "checkpoints" / "step-00000008", tmp_path / "hf", "hf", ExportRequest())
    train_here(tmp_path / "next", init=str(tmp_path / "hf"), steps=1, optimizer=OPTIMIZER)
    before, after = (evaluations(metrics(run, "eval")) for run in (source, tmp_path / "next"))
    assert after[0] == pytest.approx(before[-1], abs=1e-6)


@pytest.mark.parametrize("kind", ["ours", "hf"])
def test_a_larger_vocabulary_keeps_the_rows_that_there_are(
    kind: str, source: Path, tmp_path: Path, train_here: TrainHere
) -> None:
    step = source / "checkpoints" / "step-00000008"
    place = step if kind == "ours" else tmp_path / "hf"
    if kind == "hf":
        export_weights(step, place, "hf", ExportRequest())
    init = {"source": str(place), "extend_vocabulary": True}
    optimizer = {"lr": 1e-12, "weight_decay": 0.0}
    train_here(tmp_path / "next", init=init, model={**MODEL, "vocab": 70}, steps=1, optimizer=optimizer)
    old = open_checkpoint(step).read(["tokens.weight"])["tokens.weight"]
    new = open_checkpoint(tmp_path / "next" / "checkpoints" / "step-00000001").read(["tokens.weight"])
    table = new["tokens.weight"]
    assert table.shape == (70, 32) and torch.allclose(table[:60], old, atol=1e-6)
    assert 0.01 < table[60:].std() < 0.03


def faults_of(raw: dict[str, Any], base: Path) -> dict[str, str]:
    answer = check({"train": raw, "world_size": 1, "base_dir": str(base)})
    return {fault["key"]: f"{fault['what']} | {fault['remedy']}" for fault in answer["faults"]}


def test_a_plan_refuses_another_shape_and_vocabulary(source: Path, tmp_path: Path, raw_config: Make) -> None:
    other = {**MODEL, "layers": 3, "hidden": 64, "vocab": 61}
    found = faults_of(raw_config(init=str(source), model=other), tmp_path)
    assert found["train.model.layers"].endswith("a model with 2 | use 2")
    assert "use 32" in found["train.model.hidden"]
    assert "extend_vocabulary" in found["train.model.vocab"]
    assert not faults_of(raw_config(init=str(source)), tmp_path)
    assert "train.init.extend_vocabulary" not in faults_of(raw_config(init={"source": str(source)}), tmp_path)


def test_a_plan_refuses_a_checkpoint_without_its_files(
    source: Path, tmp_path: Path, raw_config: Make
) -> None:
    older, newest = (source / "checkpoints" / f"step-0000000{step}" for step in (4, 8))
    files = sorted(path.name for path in newest.glob("*.safetensors"))
    whole = newest / files[0]
    whole.write_bytes(whole.read_bytes()[:-1])
    # The ranks would take the older checkpoint.
    assert older.is_dir() and not faults_of(raw_config(init=str(source)), tmp_path)
    (newest / files[0]).unlink()
    named = faults_of(raw_config(init=str(newest)), tmp_path)
    count = len(list(newest.iterdir()))
    assert f"step-00000008: 1 of {count} files missing or incomplete: {files[0]} |" in named[SOURCE]
    for path in older.glob("*.safetensors"):
        path.unlink()
    assert "step-00000008: 1 of" in faults_of(raw_config(init=str(source)), tmp_path)[SOURCE]
    # Of several nodes, others may have the files, unless all get the same folder.
    document = {"train": raw_config(init=str(source), hardware={"devices_per_node": 1}), "world_size": 2}
    (note,) = [note for note in check(document)["summary"]["notes"] if "train.init" in note]
    assert "1 of " in note and note.endswith("the other nodes must have them")
    assert not check({**document, "data": str(tmp_path)})["ok"]


def test_a_plan_refuses_a_tokenizer_with_other_ids(source: Path, tmp_path: Path, raw_config: Make) -> None:
    from trainer.plan.check_init import tokenizer_faults

    def write(name: str, **ids: int) -> Path:
        (tmp_path / name).write_text(json.dumps({"model": {"vocab": ids}, "added_tokens": []}))
        return tmp_path / name

    theirs, more = write("theirs.json", a=0, b=1), write("more.json", a=0, b=1, c=2)
    assert not list(tokenizer_faults(more, theirs))
    (fault,) = tokenizer_faults(write("other.json", a=1, b=0), theirs)
    assert "token 'a' has the id 1" in fault.what and "it has the id 0" in fault.what


@pytest.mark.parametrize(
    ("init", "text"),
    [("nothing/here", "no such file"), ({"extend_vocabulary": True}, "train.init.source")],
)
def test_what_cannot_be_begun_with_is_refused(
    init: Any, text: str, tmp_path: Path, train_here: TrainHere
) -> None:
    with pytest.raises((TrainerError, ConfigFaults)) as caught:
        train_here(tmp_path / "next", init=init)
    assert text in str(caught.value)
