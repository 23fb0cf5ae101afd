from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import native
from trainer.config.model import ModelConfig
from trainer.config.rope import RopeConfig
from trainer.errors import InputError
from trainer.generate.batcher import Batcher
from trainer.generate.network import Network, of_model
from trainer.generate.request import Continuation, End, Request
from trainer.generate.sampling import Drawn, Sampling
from trainer.model.gpt import GPT

END = 0
PAGES = 200
SHAPE = ModelConfig(layers=2, hidden=64, heads=4, sequence=128, vocab=300, init_std=0.2)
SHAPES = {
    "gpt2": SHAPE,
    "rotary": replace(SHAPE, rotary=True, swiglu=True, query_groups=2),
    "llama": replace(SHAPE, rotary=True, swiglu=True, query_groups=1, norm="rms", bias="none", tied=False),
    "window": replace(
        SHAPE, rotary=True, window=20, qk_norm=True, sandwich_norms=True, bias="qkv", head_dim=24
    ),
    "neox": replace(SHAPE, rotary=True, rope=RopeConfig(part=0.25, interleaved=True), parallel_residual=True),
    "odd": replace(SHAPE, hidden=60, heads=3, activation="gelu"),
}


class Collector:
    """A sink that stores everything."""

    def __init__(self) -> None:
        self.drawn: list[Drawn] = []
        self.prompt: list[Drawn] = []
        self.reason: End | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.drawn]

    def scored(self, prompt: Sequence[Drawn]) -> None:
        self.prompt = list(prompt)

    def token(self, drawn: Drawn) -> bool:
        self.drawn.append(drawn)
        return False

    def end(self, reason: End, message: str = "", closing: Drawn | None = None) -> None:
        self.reason = reason


def request(prompt: Sequence[int], sampling: Sampling, score: bool = False) -> tuple[Request, Collector]:
    sink = Collector()
    course = Continuation(prompt, sampling, [END], SHAPE.sequence)
    return Request(course, sampling, sink, prompt, score), sink


def run(
    network: Network, orders: Sequence[tuple[Sequence[int], Sampling]], pages: int = PAGES
) -> list[Collector]:
    batcher, sinks = Batcher(network, pages), []
    for prompt, sampling in orders:
        made, sink = request(prompt, sampling)
        batcher.submit(made)
        sinks.append(sink)
    while not batcher.idle:
        batcher.step()
    assert batcher.pages.free == pages and batcher.reserved == 0
    return sinks


def models(name: str) -> GPT:
    return GPT(SHAPES[name], native.choose("cpu")).eval()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", [True, False])
def test_greedy_tokens_are_those_of_the_model_without_a_cache(name: str, kernel: bool) -> None:
    model = models(name)
    if kernel and (reason := native_missing()):
        pytest.skip(reason)
    prompt = [5, 6, 7, 8, 9] * 4
    (sink,) = run(of_model(model, PAGES, kernel=kernel), [(prompt, Sampling(40, temperature=0))])
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(40):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert sink.ids == ids[len(prompt) :] and sink.reason is End.LENGTH


def native_missing() -> str:
    from native.decode.packed import why_not

    return why_not()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_text_is_the_same_bit_by_bit_whatever_else_is_in_the_batch(name: str, kind: str) -> None:
    if reason := native_missing():
        pytest.skip(reason)
    network = of_model(models(name), PAGES, kind)
    orders = [([i + 1] * (3 * i + 1), Sampling(30, 1.0, seed=i, top_p=0.9, logprobs=2)) for i in range(12)]
    orders += [([7] * 50, Sampling(20, seed=seed, top_k=9, min_p=0.01)) for seed in (77, 78)]
    orders.append(([3] * 40, Sampling(20, beams=3)))
    together = run(network, orders)
    assert together[12].ids != together[13].ids
    for order, sink in zip(orders, together, strict=True):
        (alone,) = run(network, [order])
        # Log probabilities are equal as numbers, not only nearly.
        assert alone.drawn == sink.drawn and alone.reason == sink.reason


def test_a_shared_beginning_is_computed_once_and_changes_nothing() -> None:
    network = of_model(models("gpt2"), PAGES)
    batcher = Batcher(network, PAGES)
    found = []
    for tail in ([1], [1], [2, 3]):
        made, sink = request([7] * 50 + tail, Sampling(20, seed=77, logprobs=0))
        batcher.submit(made)
        while not batcher.idle:
            batcher.step()
        found.append(sink)
    assert batcher.reused_tokens == 2 * 48
    if not native_missing():
        assert found[0].drawn == found[1].drawn
    assert found[0].ids == found[1].ids
    assert run(network, [([7] * 50 + [2, 3], Sampling(20, seed=77, logprobs=0))])[0].ids == found[2].ids


def test_prompts_are_scored_as_the_model_does() -> None:
    model = models("gpt2")
    batcher, prompt = Batcher(of_model(model, PAGES), PAGES), list(range(1, 100))
    made, sink = request(prompt, Sampling(1, temperature=0, logprobs=3), score=True)
    empty, scored = request(prompt, Sampling(0, logprobs=0), score=True)
    batcher.submit(made)
    batcher.submit(empty)
    while not batcher.idle:
        batcher.step()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([prompt]))[0], -1)
    assert [token.id for token in sink.prompt] == prompt[1:] and len(sink.drawn) == 1
    for at, token in enumerate(sink.prompt):
        assert token.logprob == pytest.approx(float(logprobs[at, prompt[at + 1]]), abs=1e-4)
        assert [number for number, _ in token.top] == logprobs[at].topk(3).indices.tolist()
    assert [t.logprob for t in scored.prompt] == [t.logprob for t in sink.prompt] and not scored.drawn


def test_a_full_cache_makes_requests_wait_and_never_fails_one_that_started() -> None:
    network = of_model(models("gpt2"), 8)
    orders = [([i + 1] * 20, Sampling(40, seed=i)) for i in range(7)]
    sinks = run(network, orders, pages=8)
    assert {sink.reason for sink in sinks} <= {End.LENGTH, End.STOP}
    assert [sink.ids for sink in sinks] == [run(network, [order], pages=8)[0].ids for order in orders]
    with pytest.raises(InputError, match="may need 12 pages of the cache, which has only 8"):
        Batcher(network, 8).submit(request([1] * 20, Sampling(20, beams=4))[0])


def test_a_cancelled_request_frees_its_pages_before_the_next_step() -> None:
    batcher = Batcher(of_model(models("gpt2"), PAGES), PAGES)
    first, sink = request([1] * 40, Sampling(60, seed=1))
    waiting, other = request([2] * 40, Sampling(60, seed=2))
    batcher.most_running = 1
    batcher.submit(first)
    batcher.submit(waiting)
    batcher.step()
    assert batcher.pages.free < PAGES
    first.cancelled = waiting.cancelled = True
    batcher.step()
    assert batcher.idle and batcher.pages.free == PAGES
    assert sink.reason is other.reason is End.CANCELLED


def test_beams_find_a_text_that_is_at_least_as_likely_as_the_greedy_one() -> None:
    model = models("gpt2")
    network = of_model(model, PAGES)
    prompt = [9, 8, 7] * 5
    greedy, wide = run(network, [(prompt, Sampling(8, temperature=0)), (prompt, Sampling(8, beams=6))])

    def likelihood(ids: list[int]) -> float:
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([prompt + ids]))[0], -1)
        return sum(float(rows[len(prompt) - 1 + at, number]) for at, number in enumerate(ids))

    assert likelihood(wide.ids) >= likelihood(greedy.ids) and len(wide.ids) <= 8


def test_pages_of_a_failed_network_come_back() -> None:
    network = of_model(models("gpt2"), PAGES)
    batcher = Batcher(network, PAGES)
    made, sink = request([1] * 40, Sampling(60))
    batcher.submit(made)
    batcher.step()
    batcher.fail_all("out of memory")
    assert sink.reason is End.FAILED and batcher.idle and batcher.pages.free == PAGES
