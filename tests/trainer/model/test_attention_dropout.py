"""Dropout of attention probabilities: a share of them in training, none in evaluation, other ones on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from trainer.config.model import ModelConfig
from trainer.model.attention.heads import Attention
from trainer.model.dropout import Seeds, drawn
from trainer.model.layers import Block
from trainer.model.recompute import NOTHING
from trainer.parallel.tensor import ALONE, Parallel

SHAPE = ModelConfig(layers=1, hidden=32, heads=4, sequence=48, attention_dropout=0.25)


def attention_of(parallel: Parallel) -> Attention:
    return Attention(SHAPE, native.choose("cpu"), parallel, NOTHING)


def test_evaluation_drops_nothing() -> None:
    torch.manual_seed(3)
    blocks = [
        Block(shape, native.choose("cpu")).eval() for shape in (SHAPE, replace(SHAPE, attention_dropout=0.0))
    ]
    for parameter in blocks[0].parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    blocks[1].load_state_dict(blocks[0].state_dict())
    x = torch.randn(2, 48, 32)
    assert torch.equal(blocks[0](x), blocks[1](x))
    assert not torch.equal(blocks[0].train()(x), blocks[1](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "reference"])
def test_the_mean_over_many_draws_is_attention_without_dropout(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    attention = attention_of(ALONE)
    q, k, v = torch.randn(3, 1, 4, 16, 8, dtype=dtype)
    # Each sample of a batch draws its own.
    many = [x.expand(2000, -1, -1, -1) for x in (q, k, v)]
    with torch.no_grad():
        draws = attention.attend(*many)
        whole = attention.eval().attend(q, k, v)[0]
    assert draws.std(0).max() > 0.1
    # Six deviations of the mean of 2,000 draws.
    assert ((draws.mean(0) - whole).abs() <= 6 * draws.std(0) / 2000**0.5 + 1e-5).all()


def test_ranks_drop_what_one_rank_would_and_leave_the_generator_alike() -> None:
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 2, 4, 48, 8)
    parts, after = [], []
    for size in (1, 4):
        for rank in range(size):
            torch.manual_seed(5)
            own = slice(4 // size * rank, 4 // size * (rank + 1))
            attention = attention_of(Parallel(rank, size))
            parts.append(attention.attend(q[:, own], k[:, own], v[:, own]).detach())
            after.append(torch.rand(8))
    assert torch.equal(parts[0], torch.cat(parts[1:], 1))
    assert all(torch.equal(after[0], numbers) for numbers in after[1:])


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {}, id="alone"),
        pytest.param(2, {"parallel": {"tensor": 2, "sequence": True}}, id="sequence"),
        pytest.param(2, {"parallel": {"pipeline": 2}, "micro_batch": 4}, id="pipeline"),
        pytest.param(2, {"zero": 3, "recompute": "full"}, id="zero3-recompute"),
    ],
)
def test_a_training_with_it_ends_in_every_layout_and_gives_the_same_twice(
    ranks: int,
    changes: dict[str, Any],
    tmp_path: Path,
    prefix: Path,
    raw_config: Callable[..., dict[str, Any]],
    run_ranks: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
) -> None:
    model = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 60, "attention_dropout": 0.2}
    losses = []
    for name in ("one", "two"):
        done = run_ranks(ranks, raw_config(model=model, **changes), tmp_path / name)
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
        losses.append([line["loss"] for line in metrics(tmp_path / name, "step")])
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_seeds_drawn_together_are_those_drawn_one_by_one() -> None:
    torch.manual_seed(9)
    one_by_one = [Seeds().next(1)[0] for _ in range(5)]
    torch.manual_seed(9)
    rows = drawn(5)
    assert torch.equal(rows, torch.stack(one_by_one))
    seeds = Seeds()
    seeds.restart(rows)
    assert [*seeds.next(3).tolist(), *seeds.next(2).tolist()] == rows.tolist() and seeds.taken == 5
