"""Greedy tokens and beams, judged by transformers where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.generate.test_batcher import Collector
from tests.trainer.weights import test_families as families
from trainer.generate.batcher import Batcher
from trainer.generate.loading import load_network
from trainer.generate.request import Continuation, Request
from trainer.generate.sampling import Sampling
from trainer.weights.convert import import_weights

# transformers changes the angles of dynamic scaling while a text grows; here they are those of the training's length.
NAMES = [name for name in families.CASES if "dynamic" not in name]
PROMPT = [5, 17, 9, 100, 31, 64, 3, 77]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def generated(folder: Path, sampling: Sampling) -> list[int]:
    network, _, pages = load_network(folder, cache=None)
    batcher, sink = Batcher(network, pages), Collector()
    course = Continuation(PROMPT, sampling, [2], network.config.context)
    batcher.submit(Request(course, sampling, sink, PROMPT))
    while not batcher.idle:
        batcher.step()
    return sink.ids


def theirs(model: Any, **values: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=2,
            eos_token_id=2,
            do_sample=False,
            **values,
        )
    found: list[int] = out[0, len(PROMPT) :].tolist()
    return found[: found.index(2)] if 2 in found else found


@pytest.mark.parametrize("name", NAMES)
def test_64_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(families.SHARED, "max_position_embeddings", 96)
    model = families.peer(transformers, name)
    model.save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ours")
    assert generated(tmp_path / "ours", Sampling(64, temperature=0)) == theirs(model, max_new_tokens=64)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_beams_are_those_of_transformers(
    tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch, penalty: float
) -> None:
    monkeypatch.setitem(families.SHARED, "max_position_embeddings", 96)
    model = families.peer(transformers, "llama")
    model.save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ours")
    sampling = Sampling(20, beams=4, length_penalty=penalty)
    assert generated(tmp_path / "ours", sampling) == theirs(
        model, max_new_tokens=20, num_beams=4, length_penalty=penalty
    )


@pytest.mark.parametrize("values", [{"repetition_penalty": 1.7}, {"no_repeat_ngram": 2}])
def test_penalties_are_those_of_transformers(
    tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    monkeypatch.setitem(families.SHARED, "max_position_embeddings", 96)
    model = families.peer(transformers, "llama")
    model.save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ours")
    same = {
        "no_repeat_ngram_size" if name == "no_repeat_ngram" else name: value for name, value in values.items()
    }
    expected = theirs(model, max_new_tokens=40, **same)
    assert generated(tmp_path / "ours", Sampling(40, temperature=0, **values)) == expected
