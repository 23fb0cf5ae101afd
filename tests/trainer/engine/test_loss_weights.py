"""The loss is the mean over all tokens that it counts, however samples are divided into micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import native
from trainer.config.model import ModelConfig
from trainer.corpus.indexed import Writer
from trainer.model.gpt import GPT
from trainer.model.masks import Ends
from trainer.parallel.group import Group

Make = Callable[..., dict[str, Any]]
Ranks = Callable[..., Any]
Read = Callable[..., list[dict[str, Any]]]

EOD = 59
MODEL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 200}
SIZES = ModelConfig(layers=1, hidden=16, heads=2, sequence=8, vocab=60)


@pytest.fixture(scope="module")
def with_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus in which whole samples are end-of-document tokens alone."""
    random = np.random.RandomState(5)
    prefix: Path = tmp_path_factory.mktemp("ends") / "text_document"
    with Writer(prefix, np.uint16) as writer:
        for _ in range(40):
            first = int(random.randint(EOD))
            words = [(first + i) % EOD for i in range(random.randint(5, 90))]
            writer.add_document([words + [EOD] * int(random.randint(1, 60))])
    return prefix


@pytest.fixture
def losses_of(with_ends: Path, tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read) -> Any:
    """Train with some ranks; return losses and norms of the steps, and the losses of the evaluations."""

    def run(ranks: int, **changes: Any) -> tuple[list[float], list[float], list[float]]:
        if changes.get("engine") == "deepspeed":
            pytest.importorskip("deepspeed")
        data = {"prefix": str(with_ends), "split": "80,20,0", "eod": EOD, "mask_eod_loss": True}
        base = {"model": MODEL, "data": data, "save": {"every": 0}}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        done = run_ranks(ranks, raw_config(**{**base, **changes}), folder)
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
        steps = metrics(folder, "step")
        assert not any(line["skipped"] for line in steps)
        return (
            [line["loss"] for line in steps],
            [line["grad_norm"] for line in steps],
            [line["loss"] for line in metrics(folder, "eval")],
        )

    return run


slow = pytest.mark.slow
LAYOUTS = [
    pytest.param(1, {"micro_batch": 1}, id="one-sample-each"),
    pytest.param(2, {"micro_batch": 1}, id="data2"),
    pytest.param(2, {"micro_batch": 2, "zero": 3}, id="data2-zero3"),
    pytest.param(2, {"micro_batch": 1, "parallel": {"tensor": 2, "sequence": True}}, id="tensor2"),
    pytest.param(2, {"micro_batch": 1, "parallel": {"pipeline": 2}}, id="pipeline2"),
    pytest.param(4, {"micro_batch": 1, "parallel": {"pipeline": 2}, "zero": 2}, id="pipeline2-data2"),
    pytest.param(2, {"micro_batch": 1, "engine": "deepspeed"}, id="deepspeed", marks=slow),
    pytest.param(2, {"micro_batch": 1, "engine": "deepspeed", "zero": 2}, id="deepspeed-zero2", marks=slow),
    pytest.param(
        4,
        {"micro_batch": 1, "engine": "deepspeed", "zero": 1, "parallel": {"pipeline": 2}},
        id="deepspeed-pipeline2-data2",
        marks=slow,
    ),
]


@pytest.mark.parametrize(("ranks", "changes"), LAYOUTS)
def test_a_masked_loss_is_the_same_for_any_micro_batch_and_layout(
    ranks: int, changes: dict[str, Any], losses_of: Callable[..., Any]
) -> None:
    whole, divided = losses_of(1, micro_batch=8), losses_of(ranks, **changes)
    assert len(whole[0]) == 8 and all(map(math.isfinite, (*whole[0], *whole[1], *whole[2])))
    assert divided[0] == pytest.approx(whole[0], rel=1e-5)
    assert divided[1] == pytest.approx(whole[1], rel=1e-4)
    assert divided[2] == pytest.approx(whole[2], rel=1e-5)


def test_the_corpus_has_micro_batches_that_count_no_token(with_ends: Path) -> None:
    """Check that the comparison above can fail."""
    ids = np.fromfile(with_ends.with_suffix(".bin"), np.uint16)
    samples = ids[: len(ids) // 17 * 17].reshape(-1, 17)
    assert (samples == EOD).all(1).sum() > 10


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_micro_batch_without_a_counted_token_has_loss_0_and_gradient_0(backend: str) -> None:
    model = GPT(SIZES, native.choose("cpu", backend), ends=Ends(eod=EOD, loss=True))
    inputs, targets = model.arguments((torch.full((2, 9), EOD),))
    loss = model(inputs, targets)
    loss.backward()
    assert loss.item() == 0.0 and model.counted((torch.full((2, 9), EOD),)) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_counts_are_those_of_the_targets_that_the_loss_counts() -> None:
    tokens = torch.tensor([[1, EOD, 2, 3, EOD, 4, 5, 6, EOD]])
    ops = native.choose("cpu")
    plain, masked = GPT(SIZES, ops), GPT(SIZES, ops, ends=Ends(eod=EOD, loss=True))
    assert (plain.counted((tokens,)), plain.counts_vary) == (8, False)
    assert (masked.counted((tokens,)), masked.counts_vary) == (6, True)


@pytest.mark.parametrize("micros", [3, 7, 49])
def test_equal_counts_give_every_micro_batch_the_weight_of_a_plain_mean(micros: int) -> None:
    from trainer.engine.passes import loss_weights

    model = GPT(SIZES, native.choose("cpu"))
    batch = [(torch.zeros(3, 9, dtype=torch.int64),)] * micros
    assert loss_weights(model, batch, Group(0, 1, None)) == [1.0 / micros] * micros  # type: ignore[arg-type]


def test_glms_loss_does_not_depend_on_the_micro_batch(
    train_here: Callable[..., Any], tmp_path: Path, prefix: Path, metrics: Read
) -> None:
    glm = {"kind": "glm", "layers": 1, "hidden": 32, "heads": 4, "sequence": 48, "vocab": 69}
    data = {"prefix": str(prefix), "split": "80,20,0", "eod": 3}
    for micro_batch in (8, 1):
        train_here(tmp_path / str(micro_batch), model=glm, data=data, micro_batch=micro_batch)
    whole, divided = ([line["loss"] for line in metrics(tmp_path / name, "step")] for name in ("8", "1"))
    assert divided == pytest.approx(whole, rel=1e-5) and len(whole) == 8
