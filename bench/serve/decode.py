"""Tokens per second of the decoder, for one text and for several, for prompts, and at the limit of memory speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import native
from native.decode.packed import KINDS
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.generate.batcher import Batcher
from trainer.generate.network import Network, of_model
from trainer.generate.request import Continuation, End, Request
from trainer.generate.sampling import Drawn, Sampling
from trainer.model.gpt import GPT

PAGES = 1200
PROMPT, NEW, ROUNDS = 32, 64, 3
CONFIG: ModelConfig = SIZES["gpt2-124M"]


Now = Callable[[], float]


class Clock:
    """A sink that records when tokens arrive."""

    def __init__(self, clock: Now) -> None:
        self.times, self.ids, self.clock = list[float](), list[int](), clock

    def scored(self, prompt: Sequence[Drawn]) -> None:
        pass

    def token(self, drawn: Drawn) -> bool:
        self.times.append(self.clock())
        self.ids.append(drawn.id)
        return False

    def end(self, reason: End, message: str = "", closing: Drawn | None = None) -> None:
        pass


def figures(only: str, clock: Now = time.perf_counter) -> Iterator[dict[str, Any]]:
    """Yield each figure whose name contains `only`."""
    model = GPT(CONFIG, native.choose("cpu")).eval()
    for kind in KINDS:
        names = [f"decode 1 {kind}", f"decode 8 {kind}", f"prefill 512 {kind}"]
        if not any(only in name for name in names):
            continue
        network = of_model(model, PAGES, kind)
        floor = floor_of(network, clock)
        if only in names[0]:
            yield {"figure": names[0], "tokens_per_second": decode(network, 1, clock), "floor": floor}
        if only in names[1]:
            yield {"figure": names[1], "tokens_per_second": decode(network, 8, clock)}
        if only in names[2]:
            seconds = prefill(network, clock)
            yield {"figure": names[2], "tokens_per_second": 512 / seconds, "first_token_seconds": seconds}


def run(
    network: Network,
    orders: Sequence[tuple[Sequence[int], int]],
    clock: Now = time.perf_counter,
    pages: int = PAGES,
) -> tuple[float, list[Clock]]:
    """Run requests (ids, number of tokens) together; return when they began, and their sinks."""
    batcher, clocks = submitted(network, orders, clock, pages)
    began = clock()
    while not batcher.idle:
        batcher.step()
    return began, clocks


def submitted(
    network: Network, orders: Sequence[tuple[Sequence[int], int]], clock: Now, pages: int
) -> tuple[Batcher, list[Clock]]:
    """Return a batcher that has these requests, and their sinks."""
    batcher, clocks = Batcher(network, pages), [Clock(clock) for _ in orders]
    for (ids, count), sink in zip(orders, clocks, strict=True):
        sampling = Sampling(count, temperature=0)
        batcher.submit(Request(Continuation(ids, sampling, [], network.config.sequence), sampling, sink))
    return batcher, clocks


def prompts(count: int, length: int, vocab: int = CONFIG.vocab) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (length,), generator=random).tolist() for _ in range(count)]


def decode(network: Network, texts: int, clock: Now) -> float:
    """Return tokens per second after the first token of each text: the best of several rounds."""
    best = 0.0
    for _ in range(ROUNDS):
        _, clocks = run(network, [(ids, NEW) for ids in prompts(texts, PROMPT)], clock)
        began, ended = max(clock.times[0] for clock in clocks), max(clock.times[-1] for clock in clocks)
        best = max(best, texts * (NEW - 1) / (ended - began))
    return best


def prefill(network: Network, clock: Now) -> float:
    """Return the seconds until the first token after a prompt of 512 tokens."""
    best = float("inf")
    for _ in range(ROUNDS):
        began, clocks = run(network, [(prompts(1, 512)[0], 1)], clock)
        best = min(best, clocks[0].times[0] - began)
    return best


def floor_of(network: Network, clock: Now) -> float:
    """Return the tokens per second if each token only took the time to read all weights once."""
    packed = [module.packed for module in network.model.modules() if hasattr(module, "packed")]
    size = sum(entry.bytes for entry in packed)
    weights = torch.ones(size // 4)
    best = float("inf")
    for _ in range(ROUNDS):
        began = clock()
        weights.sum()
        best = min(best, clock() - began)
    return 1 / best
