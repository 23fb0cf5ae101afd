from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from trainer.generate.sampling import Sampling, adjusted, choose, uniform

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))


def drawn(sampling: Sampling, count: int = 2000) -> Counter[int]:
    new = list[int]()
    found: Counter[int] = Counter()
    for _ in range(count):
        found[choose(LOGITS, sampling, [], new).id] += 1
        # Only the number of tokens matters for the random number.
        new.append(0)
    return found


def test_tokens_are_drawn_by_their_probabilities() -> None:
    found = drawn(Sampling(seed=3))
    for number, part in enumerate((0.4, 0.3, 0.15, 0.1, 0.05)):
        assert found[number] / 2000 == pytest.approx(part, abs=4 * math.sqrt(part / 2000))


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"top_p": 0.4}, {0}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"top_k": 4, "top_p": 0.75}, {0, 1, 2}),
        ({"temperature": 0}, {0}),
        ({"temperature": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.9, "top_p_decay": 0.01, "top_p_bound": 0.5}, {0, 1}),
        ({"bias": {0: -100.0, 1: -100.0}}, {2, 3, 4}),
    ],
)
def test_unlikely_tokens_are_left_out(values: dict[str, float], left: set[int]) -> None:
    assert set(drawn(Sampling(**values))) == left  # type: ignore[arg-type]


def test_a_long_vocabulary_is_cut_as_a_short_one() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5000)
    order = logits.sort(descending=True)
    sums = torch.softmax(order.values.double(), -1).cumsum(-1)
    for top_p in (0.05, 0.3, 0.999):
        allowed = set(order.indices[: int((sums < top_p).sum()) + 1].tolist())
        seen = {choose(logits, Sampling(top_p=top_p, seed=seed), [], []).id for seed in range(200)}
        assert seen <= allowed and len(seen) > 1


def test_random_numbers_depend_on_seed_and_index_alone() -> None:
    assert uniform(1, 2) == uniform(1, 2) != uniform(2, 1)
    numbers = [uniform(seed, index) for seed in range(40) for index in range(40)]
    assert len(set(numbers)) == 1600 and min(numbers) >= 0 and max(numbers) < 1
    assert sum(numbers) / 1600 == pytest.approx(0.5, abs=0.03)


def test_penalties_change_the_logits_of_what_was_used() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    scores = adjusted(logits, Sampling(repetition_penalty=2.0), [0], [1])
    assert scores.tolist() == [1.0, -4.0, 1.0, 0.5] and logits[0] == 2
    scores = adjusted(logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), [2], [0, 0, 1])
    assert scores.tolist() == [1.0, -2.75, 1.0, 0.5]
    scores = adjusted(logits, Sampling(no_repeat_ngram=2), [3, 1], [0, 3])
    assert scores.tolist() == [2.0, -math.inf, 1.0, 0.5]
    assert adjusted(logits, Sampling(), [1], [2]) is logits


def test_log_probabilities_are_the_models_own() -> None:
    token = choose(LOGITS, Sampling(temperature=0.1, logprobs=2, bias={3: 50.0}), [], [])
    assert token.id == 3 and token.logprob == pytest.approx(math.log(0.1))
    assert [number for number, _ in token.top] == [0, 1] and token.top[0][1] == pytest.approx(math.log(0.4))


def test_every_value_out_of_range_is_named() -> None:
    bad = Sampling(
        max_tokens=-1, temperature=101, top_k=-1, top_p=0, min_p=2, beams=0, stop=("",), seed=2**64
    )
    named = {name for name, _ in bad.faults()}
    assert named == {"max_tokens", "temperature", "top_k", "top_p", "min_p", "beams", "stop", "seed"}
    assert not Sampling().faults()
