from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import weights
from trainer.config.model import ModelConfig
from trainer.corpus.tokenizer import train_tokenizer
from trainer.errors import InputError
from trainer.generate.ranks import Division, alone

MODEL = replace(
    weights.GPT, sequence=64, query_groups=2, rotary=True, swiglu=True, norm="rms", tied=False, vocab=310
)
PROMPTS = ["one two", "three " * 20, "two", "one two three one"]
GREEDY = ("--temperature", "0", "--max-tokens", "24", "--ignore-end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("divided") / "model", MODEL)


def checkpoint(folder: Path, model: ModelConfig) -> Path:
    weights.checkpoint(folder, model, weights.random_state(model))
    train_tokenizer(iter(["one two three " * 50] * 5), 300, folder / "tokenizer.json")
    return folder


def texts(
    run_ranks: Callable[..., Any], ranks: int, folder: Path, run_dir: Path, *arguments: str
) -> list[str]:
    lines = [f"--prompt-line={prompt}" for prompt in PROMPTS]
    argv = ["generate", "--checkpoint", str(folder), *lines, *GREEDY, *arguments]
    ended = run_ranks(ranks, {}, run_dir, argv)
    assert [done.returncode for done in ended] == [0] * ranks, [done.stderr for done in ended]
    assert not any(done.stdout for done in ended[1:])
    return [json.loads(line)["text"] for line in ended[0].stdout.splitlines()]


@pytest.mark.parametrize(
    "layout", [(2, 1), (1, 2), (2, 2), (1, 3)], ids=lambda layout: f"tensor {layout[0]}, pipeline {layout[1]}"
)
def test_ranks_that_divide_a_model_generate_what_one_does(
    run_ranks: Callable[..., Any], folder: Path, tmp_path: Path, layout: tuple[int, int]
) -> None:
    tensor, pipeline = layout
    alone = texts(run_ranks, 1, folder, tmp_path)
    assert len(set(alone)) == len(PROMPTS)
    parts = ("--tensor", str(tensor), "--pipeline", str(pipeline))
    assert texts(run_ranks, tensor * pipeline, folder, tmp_path, *parts) == alone


def test_experts_are_divided_too(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    model = replace(weights.GPT, sequence=64, experts=4, vocab=310)
    folder = checkpoint(tmp_path / "experts", model)
    alone = texts(run_ranks, 1, folder, tmp_path)
    assert texts(run_ranks, 2, folder, tmp_path) == alone


def test_an_error_of_rank_0_is_the_only_one(
    run_ranks: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    """The second prompt does not fit, after the first has been computed by both ranks."""
    argv = ["generate", "--checkpoint", str(folder), *GREEDY]
    lines = ["--prompt-line=one two", "--prompt-line=" + "one " * 200]
    first, second = run_ranks(2, {}, tmp_path, [*argv, *lines])
    assert (
        first.returncode == 2 and "error: " in first.stderr and "the model's context is 64" in first.stderr
    ), first.stderr
    assert second.returncode == 0 and "error" not in second.stderr.lower(), second.stderr


def test_a_division_that_does_not_fit_is_refused() -> None:
    assert Division().layout(4, MODEL).tensor == 2
    assert Division().layout(4, MODEL).pipeline == 2
    with pytest.raises(InputError, match="3 ranks, but there are 4"):
        Division(tensor=3, pipeline=1).layout(4, MODEL)
    with pytest.raises(InputError, match=r"--tensor 4 does not divide 4 heads, 2 key heads"):
        Division(tensor=4).layout(4, MODEL)
    with pytest.raises(InputError, match="--pipeline 8 is more than the model's 4 layers"):
        Division(pipeline=8).layout(8, MODEL)
    with pytest.raises(InputError, match="--tensor 2 x --pipeline 1 is 2 ranks, but there are 1"):
        alone().divide(MODEL, Division(tensor=2))
