"""A tokenizer that does not fit the model is reported before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
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
