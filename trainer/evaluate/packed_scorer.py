"""Score requests with packed matrices over a paged cache: no padding, and a shared context is computed only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from native.compiled import library
from native.decode.paged import PAGE
from native.decode.program import likelihoods
from trainer.engine.passes import Model
from trainer.evaluate.request import Request, Score
from trainer.evaluate.scorer import BATCH_TOKENS
from trainer.generate.loading import free_memory
from trainer.generate.modules import Step, page_bytes
from trainer.generate.network import heads_of, of_model, spans_of
from trainer.model.gpt import GPT

# New tokens per step: with 50,257 columns in fp32 their logits take 100 MB.
STEP_TOKENS = 512
# The cache has pages for at least this many tokens, so that short texts fill a step.
CACHED_TOKENS = 1024


def why_not(model: Model) -> str:
    """Return why a model cannot be scored with packed matrices; "" if it can."""
    parameters = list(model.parameters())
    if parameters[0].device.type != "cpu":
        return "it is not on the CPU"
    if not isinstance(model, GPT) or model.config.experts:
        return "it is a GLM, or has experts"
    if model.config.rope.scaling == "dynamic":
        return "its rotary angles depend on the length of the text"
    page = page_bytes(heads_of(model))
    size = sum(parameter.numel() * 4 for parameter in parameters) + _pages(model) * page
    if size > free_memory() // 2:
        return "there is no memory for a packed copy"
    return library.why_not()


def _pages(model: GPT) -> int:
    return -(-max(model.config.sequence, CACHED_TOKENS) // PAGE)


@dataclass(frozen=True)
class _Part:
    """Tokens [begin, end) of a request in a batch, and the pages of the request."""

    index: int
    request: Request
    table: list[int]
    begin: int
    end: int


class PackedScorer:
    """Scores requests with a model; the result of a request does not depend on the others in its batch."""

    def __init__(self, model: Model, batch_tokens: int = BATCH_TOKENS) -> None:
        assert isinstance(model, GPT)
        self.batch_tokens = batch_tokens
        self._pages = _pages(model)
        self._network = of_model(model, self._pages)

    def batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield batches of request indices that fit the cache's pages; requests with the same context are adjacent."""
        order = sorted(
            range(len(requests)),
            key=lambda index: (-len(requests[index].context), requests[index].context, index),
        )
        batch, pages, tokens = list[int](), 0, 0
        for index in order:
            length = requests[index].length
            needed = -(-length // PAGE)
            if batch and (pages + needed > self._pages or tokens + length > self.batch_tokens):
                yield batch
                batch, pages, tokens = [], 0, 0
            batch.append(index)
            pages += needed
            tokens += length
        if batch:
            yield batch

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each request of one batch."""
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        for parts in _steps(_placed(requests)):
            for index, likelihood, is_best in self._computed(parts):
                totals[index] += likelihood
                greedy[index] &= is_best
        return [Score(total, best) for total, best in zip(totals, greedy, strict=True)]

    def _computed(self, parts: Sequence[_Part]) -> Iterator[tuple[int, float, bool]]:
        """Compute a step.

        Yield for each token of a target its request's index, its log probability, and whether it is the most likely.
        """
        ids, positions = list[int](), list[int]()
        wanted, targets, owners = list[int](), list[int](), list[int]()
        for part in parts:
            request, start = part.request, len(part.request.context) - 1
            inputs = (*request.context, *request.target[:-1])
            for at in range(max(part.begin, start), part.end):
                wanted.append(len(ids) + at - part.begin)
                targets.append(request.target[at - start])
                owners.append(part.index)
            ids += inputs[part.begin : part.end]
            positions += range(part.begin, part.end)
        spans = spans_of(
            [part.table for part in parts],
            [(part.begin, part.end) for part in parts],
            [0] * len(parts),
            self._network.window,
        )
        step = Step(
            torch.tensor(ids), torch.tensor(positions), spans, torch.tensor(wanted, dtype=torch.int64)
        )
        logits = self._network.logits(step)
        found, best = likelihoods(logits, torch.tensor(targets, dtype=torch.int64))
        yield from zip(owners, found.double().tolist(), best.tolist(), strict=True)


def _placed(requests: Sequence[Request]) -> Iterator[_Part]:
    """Yield each request with its pages; it reuses the full pages of a context that the previous request has too."""
    table, taken = list[int](), 0
    for index, request in enumerate(requests):
        shared = 0
        if index and request.context == requests[index - 1].context:
            # The last token of the context is recomputed, because its logits are needed.
            shared = (len(request.context) - 1) // PAGE
        new = -(-request.length // PAGE) - shared
        table = table[:shared] + list(range(taken, taken + new))
        taken += new
        yield _Part(index, request, table, shared * PAGE, request.length)


def _steps(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Yield the parts of each step; a part that does not fit into a step is continued in the next step."""
    step, room = list[_Part](), STEP_TOKENS
    for part in parts:
        begin = part.begin
        while begin < part.end:
            end = min(part.end, begin + room)
            step.append(replace(part, begin=begin, end=end))
            room -= end - begin
            begin = end
            if not room:
                yield step
                step, room = [], STEP_TOKENS
    if step:
        yield step
