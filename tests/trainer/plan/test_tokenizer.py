"""A tokenizer that does not fit the model is reported before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.building import SAYINGS, built, small_tokenizer, write_lines
from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
from trainer.errors import InputError
from trainer.plan.summary import check

Make = Callable[..., dict[str, Any]]
MODEL = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16}


@pytest.fixture
def asked(raw_config: Make, prefix: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a plan answers about a tokenizer of about 270 ids."""
    train_tokenizer(iter(["one two three four five. " * 9] * 9), 270, tmp_path / "tokenizer.json")

    def ask(
        name: str = "run", tokenizer: str = "tokenizer.json", eod: int | None = None, **model: Any
    ) -> dict[str, Any]:
        data = {"prefix": str(prefix), "split": "80,20,0", "tokenizer": tokenizer, "eod": eod}
        train = raw_config(model={**MODEL, **model}, data=data)
        document = {"train": train, "name": name, "base_dir": str(tmp_path), "check_data": True}
        return check(document)

    return ask


def faults(answer: dict[str, Any]) -> dict[str, str]:
    return {fault["key"]: f"{fault['what']}; {fault['remedy']}" for fault in answer["faults"]}


def test_a_vocabulary_that_the_model_lacks_is_a_fault(asked: Callable[..., Any], tmp_path: Path) -> None:
    there = Tokenizer.load(tmp_path / "tokenizer.json").vocab
    assert asked(vocab=there)["ok"]
    assert f"has {there} ids; use {there}" in faults(asked(vocab=there - 1))["train.model.vocab"]
    assert f"use {there + 9}" in faults(asked(kind="glm", vocab=there))["train.model.vocab"]
    (tmp_path / "broken.json").write_text("{}")
    assert "not a tokenizer.json" in faults(asked(tokenizer="broken.json", vocab=300))["train.data.tokenizer"]
    assert "does not exist" in faults(asked(tokenizer="none.json", vocab=300))["train.data.tokenizer"]


def test_what_is_surely_not_meant_is_noted(asked: Callable[..., Any], tmp_path: Path) -> None:
    there = Tokenizer.load(tmp_path / "tokenizer.json").vocab
    notes = "\n".join(asked("gpt-bf16", eod=7, vocab=4 * there)["summary"]["notes"])
    assert "most of its table is never trained" in notes and "its own end of a document is" in notes
    assert "is called gpt-bf16, but it trains in fp32" in notes
    assert asked("run-fp32", vocab=there)["summary"]["notes"] == []


def test_data_of_another_tokenizer_are_a_fault_in_plan_and_in_a_run(
    raw_config: Make, train_here: Callable[..., Any], tmp_path: Path
) -> None:
    words, prefix = small_tokenizer(tmp_path), tmp_path / "c"
    built(prefix, words, write_lines(tmp_path / "in.jsonl", SAYINGS * 40), append_eod=True)
    data = {"prefix": str(prefix), "split": "80,20,0", "tokenizer": str(words)}
    model = {**MODEL, "vocab": 300}

    def planned() -> dict[str, Any]:
        train = raw_config(model=model, data=data)
        return check({"train": train, "name": "run", "base_dir": str(tmp_path), "check_data": True})

    assert planned()["ok"]
    train_tokenizer(iter(["the mat; café"] * 9), 280, words, overwrite=True)
    assert "is not the tokenizer that encoded" in faults(planned())["train.data.tokenizer"]
    with pytest.raises(InputError, match="is not the tokenizer that encoded"):
        train_here(tmp_path / "run", steps=20, model=model, data=data)
