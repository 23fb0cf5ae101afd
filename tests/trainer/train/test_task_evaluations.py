from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.parts import EVALUATION_TASKS
from trainer.corpus.tokenizer import train_tokenizer
from trainer.errors import InputError
from trainer.evaluate.tasks import TASKS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    train_tokenizer(iter(["one two three " * 50] * 5), 290, folder / "tokenizer.json")
    texts = [{"text": f"one two {word}"} for word in ("three", "one", "two")]
    (folder / "lambada.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    choices = {"context": "one", "choices": [" two", " three"], "label": 0}
    (folder / "choice.jsonl").write_text(json.dumps(choices) + "\n")
    return folder


def changes(files: Path, *tasks: str) -> dict[str, Any]:
    model = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 300, "dropout": 0.1}
    listed = [f"{task}={files / task}.jsonl" for task in tasks]
    return {"model": model, "eval": {"every": 4, "batches": 2, "tasks": listed}, "steps": 8}


def test_tasks_are_evaluated_with_the_validation_and_change_nothing(
    train_here: Callable[..., Any],
    raw_config: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
    files: Path,
    tmp_path: Path,
) -> None:
    losses = {}
    data = {**raw_config()["data"], "tokenizer": str(files / "tokenizer.json")}
    for name, tasks in (("with", ("lambada", "choice")), ("without", ())):
        train_here(tmp_path / name, data=data, **changes(files, *tasks))
        lines = [*metrics(tmp_path / name, "step"), *metrics(tmp_path / name, "eval")]
        losses[name] = [(line["step"], line["loss"], line.get("grad_norm")) for line in lines]
    assert losses["with"] == losses["without"]
    found = metrics(tmp_path / "with", "evaluation")
    assert [(line["step"], line["task"]) for line in found] == [
        (step, task) for step in (0, 4, 8) for task in ("lambada", "choice")
    ]
    assert found[0]["documents"] == 3 and found[0]["convention"] == "lm-eval"
    assert found[0]["metrics"]["perplexity"]["value"] != found[2]["metrics"]["perplexity"]["value"]


def test_wrong_tasks_are_refused_before_a_step(
    train_here: Callable[..., Any], raw_config: Callable[..., Any], files: Path, tmp_path: Path
) -> None:
    data = {**raw_config()["data"], "tokenizer": str(files / "tokenizer.json")}
    with pytest.raises(InputError) as refused:
        train_here(tmp_path, data=data, **changes(files, "copa", "wikitext"))
    assert "copa.jsonl does not exist" in str(refused.value) and "wikitext.jsonl" in str(refused.value)
    with pytest.raises(InputError) as refused:
        train_here(tmp_path, **{**changes(files), "eval": {"tasks": ["lambda=x", "lambada"]}, "zero": 2})
    text = str(refused.value)
    assert "train.eval.tasks[0]" in text and "train.eval.tasks[1]" in text
    assert "train.data.tokenizer" in text and "zero is 2" in text


def test_the_names_of_tasks_are_those_that_exist() -> None:
    assert tuple(TASKS) == EVALUATION_TASKS


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}], ids=["data", "tensor"])
def test_ranks_evaluate_together(
    run_ranks: Callable[..., Any],
    raw_config: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
    files: Path,
    tmp_path: Path,
    parallel: dict[str, int],
) -> None:
    data = {**raw_config()["data"], "tokenizer": str(files / "tokenizer.json")}
    config = raw_config(data=data, **changes(files, "lambada"))
    config |= {"steps": 3, "eval": {**config["eval"], "every": 0}}
    figures = []
    for ranks in (1, 2):
        own = {**config, "parallel": parallel if ranks == 2 else {}}
        ended = run_ranks(ranks, own, tmp_path / str(ranks))
        assert [done.returncode for done in ended] == [0] * ranks, ended
        first = metrics(tmp_path / str(ranks), "evaluation")[0]
        figures.append(first["metrics"]["perplexity"]["value"])
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
