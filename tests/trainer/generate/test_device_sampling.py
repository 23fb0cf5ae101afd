"""Tokens drawn on the device are those that the host draws from the same logits."""

from __future__ import annotations

import pytest
import torch

from trainer.generate.device_sampling import Wish, draw, serves
from trainer.generate.sampling import Sampling, choose

KINDS = {
    "greedy": {"temperature": 0.0},
    "one": {"top_k": 1},
    "all": {"temperature": 1.3},
    "top_k": {"top_k": 7, "temperature": 0.8},
    "all of top_k": {"top_k": 5000},
    "top_p": {"top_p": 0.7},
    "both": {"top_k": 50, "top_p": 0.5, "temperature": 2.0},
    "min_p": {"min_p": 0.2, "temperature": 1.5},
    "everything": {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "decay": {"top_p": 0.9, "top_p_decay": 0.5, "top_p_bound": 0.1},
    "decay from 1": {"top_p": 1.0, "top_p_decay": 0.9},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_of_drawing_is_that_of_the_host(kind: str) -> None:
    logits = torch.randn(40, 700, generator=torch.Generator().manual_seed(1)) * 3
    if kind in ("greedy", "one", "all"):
        # Of equal logits the lower id comes first; the topk of the other kinds has no order of them.
        logits[::3, 100:200] = 8.0
    samplings = [Sampling(seed=row, **KINDS[kind]) for row in range(40)]
    found = draw(logits, [Wish(row, own, row % 5) for row, own in enumerate(samplings)])
    expected = [choose(logits[row], own, [], [0] * (row % 5)).id for row, own in enumerate(samplings)]
    assert found == expected
    assert kind in ("greedy", "one") or len(set(found)) > 3


def test_a_text_is_drawn_alike_in_every_batch_and_order() -> None:
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(2))
    wishes = [
        Wish(row, Sampling(seed=row, **list(KINDS.values())[row % len(KINDS)]), row) for row in range(30)
    ]
    together = draw(logits, wishes)
    assert draw(logits, wishes[::-1]) == together[::-1]
    assert [draw(logits, [wish])[0] for wish in wishes] == together


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"no_repeat_ngram": 2},
        {"bias": {3: 1.0}},
        {"logprobs": 0},
        {"beams": 2},
    ],
    ids=str,
)
def test_what_needs_the_text_or_the_logits_is_left_to_the_host(changes: dict[str, object]) -> None:
    assert serves(Sampling(), ()) and not serves(Sampling(), (5,))
    assert not serves(Sampling(**changes), ())  # type: ignore[arg-type]
