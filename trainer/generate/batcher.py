"""Continuous batching: each step computes one token of every running text, and part of the new prompts.

A request starts when the cache has pages for its longest possible text, so a running text never waits for pages. Its
tokens do not depend on the other requests: the kernels compute each row in the same order in every batch, and the
random numbers depend only on the request's seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from native.decode.paged import PAGE
from trainer.errors import InputError
from trainer.generate.beams import Beams
from trainer.generate.device_sampling import Wish, draw, serves
from trainer.generate.network import Network
from trainer.generate.pages import Pages
from trainer.generate.request import End, Request
from trainer.generate.sampling import Drawn, choose, top_of
from trainer.generate.sequence import CachedSequence, Part, step_of, wanted_rows

SCORED_TOKENS = 64
"""A scored prompt's logits are computed for this many tokens at a time: 13 MB with GPT-2's vocabulary."""


class Running:
    """A request whose pages are reserved."""

    def __init__(self, request: Request, need: int, pages: Pages) -> None:
        self.request, self.need = request, need
        self.sequence = CachedSequence(request.course.source)
        self.sequence.feed(request.course.begin())
        if not request.score_prompt and not self.sequence.source:
            self.sequence.pages = pages.find(self.sequence.ids)
            self.sequence.known = len(self.sequence.pages)
            self.sequence.computed = self.sequence.known * PAGE
        self.prompt_length = len(self.sequence.ids)
        self.new: list[int] = []
        self.scores: list[Drawn] = []
        self.beams = Beams(request, self.sequence, pages) if request.sampling.beams > 1 else None

    @property
    def sequences(self) -> list[CachedSequence]:
        return self.beams.sequences if self.beams else [self.sequence]


class Batcher:
    """Runs requests on a network. Not thread-safe: other threads may only set `Request.cancelled`."""

    def __init__(self, network: Network, pages: int, most_running: int = 64) -> None:
        self.network, self.pages, self.most_running = network, Pages(pages), most_running
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        self.reserved = 0
        self.reused_tokens = self.prompt_tokens = self.generated_tokens = self.steps = 0

    def need(self, request: Request) -> int:
        """Return the most pages that a request can use; raise an InputError if it can never fit."""
        need = -(-request.course.most() // PAGE) * request.sampling.beams
        if need > self.pages.count:
            raise InputError(
                f"the text may need {need} pages of the cache, which has only {self.pages.count}",
                "ask for fewer tokens or beams, or give the cache more memory (--cache)",
            )
        return need

    def submit(self, request: Request) -> None:
        """Add a request to the queue; it starts in one of the next steps."""
        self.need(request)
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def step(self) -> None:
        """Compute one step: some tokens of each request that is running or can start."""
        self._drop_cancelled()
        self._admit()
        parts = self._parts()
        if not parts:
            return
        for _, part in parts:
            part.sequence.make_room(part.end, self.pages, self.network)
        step = step_of([part for _, part in parts], self.network.is_glm, self.network.window)
        logits = self.network.logits(step)
        self.steps += 1
        self._deliver(parts, logits)

    def fail_all(self, message: str) -> None:
        """End every request after a failure of the network."""
        for running in list(self.running):
            self._finish(running, End.FAILED, message)
        while self.waiting:
            self.waiting.popleft().sink.end(End.FAILED, message)

    def _drop_cancelled(self) -> None:
        for running in [running for running in self.running if running.request.cancelled]:
            self._finish(running, End.CANCELLED)
        if any(request.cancelled for request in self.waiting):
            for request in self.waiting:
                if request.cancelled:
                    request.sink.end(End.CANCELLED)
            self.waiting = deque(request for request in self.waiting if not request.cancelled)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.most_running:
            need = self.need(self.waiting[0])
            if self.reserved + need > self.pages.count:
                return
            running = Running(self.waiting.popleft(), need, self.pages)
            self.reserved += need
            self.reused_tokens += running.sequence.computed
            self.prompt_tokens += running.prompt_length
            self.running.append(running)

    def _parts(self) -> list[tuple[Running, Part]]:
        """Return what the next step computes: running texts first, then prompts in the order in which they started."""
        texts = list[tuple[Running, CachedSequence]]()
        prompts = list[tuple[Running, CachedSequence]]()
        for running in self.running:
            for sequence in running.sequences:
                left = len(sequence.ids) - sequence.computed
                (texts if left == 1 and not running.request.score_prompt else prompts).append(
                    (running, sequence)
                )
        busy, idle = self.network.prompt_tokens
        budget = busy if texts else idle
        parts = [(running, Part(own, own.computed, own.computed + 1)) for running, own in texts]
        for running, sequence in prompts:
            scores = running.request.score_prompt and sequence.computed < running.prompt_length
            left = len(sequence.ids) - sequence.computed
            # All tokens of a source are computed in one step, because each attends to all others.
            size = left if sequence.source else min(left, budget, SCORED_TOKENS if scores else left)
            if size < 1:
                break
            end = sequence.computed + size
            parts.append((running, Part(sequence, sequence.computed, end, scores)))
            budget -= size
        return parts

    def _deliver(self, parts: Sequence[tuple[Running, Part]], logits: Tensor) -> None:
        """Pass each request the logits that it needs."""
        offset = 0
        complete: dict[Running, list[int]] = {}
        for running, part in parts:
            begin, offset = offset, offset + wanted_rows(part)
            part.sequence.computed = part.end
            if not part.sequence.source and not part.sequence.second[-1]:
                self._remember(part.sequence)
            if part.all_logits:
                self._score(running, part, logits[begin:offset].cpu())
            if part.completes:
                complete.setdefault(running, []).append(offset - 1)
        ready = [pair for pair in complete.items() if len(pair[1]) == len(pair[0].sequences)]
        drawn = self._drawn(ready, logits)
        for running, numbers in ready:
            own = drawn.get(running)
            # A row of a tensor costs 4 us, which 64 texts on a device would pay for rows that nothing reads.
            self._advance(running, [] if own else [logits[row] for row in numbers], own)

    def _drawn(self, ready: Sequence[tuple[Running, list[int]]], logits: Tensor) -> dict[Running, Drawn]:
        """Return the tokens that the device draws."""
        if not self.network.draws:
            return {}
        served = [
            (running, rows[0])
            for running, rows in ready
            if running.request.sampling.max_tokens
            and serves(running.request.sampling, running.request.course.banned())
        ]
        wishes = [Wish(row, running.request.sampling, len(running.new)) for running, row in served]
        ids = draw(logits, wishes)
        return {running: Drawn(number) for (running, _), number in zip(served, ids, strict=True)}

    def _remember(self, sequence: CachedSequence) -> None:
        sequence.known = self.pages.remember(
            sequence.pages, sequence.ids[: sequence.computed], sequence.known
        )

    def _score(self, running: Running, part: Part, rows: Tensor) -> None:
        ids, most = part.sequence.ids, running.request.sampling.logprobs or 0
        for at in range(part.begin, min(part.end, running.prompt_length - 1)):
            own = torch.log_softmax(rows[at - part.begin], -1)
            target = ids[at + 1]
            running.scores.append(Drawn(target, float(own[target]), top_of(own, most)))
        if part.end >= running.prompt_length:
            running.request.sink.scored(running.scores)

    def _advance(self, running: Running, rows: Sequence[Tensor], drawn: Drawn | None) -> None:
        """Extend a text by the token that the device has drawn, or by one that is drawn from the logits."""
        request = running.request
        if not request.sampling.max_tokens:
            return self._finish(running, End.LENGTH)
        if running.beams:
            end = running.beams.advance([row.cpu() for row in rows])
            self.generated_tokens += 1
            return self._finish(running, end) if end else None
        course = request.course
        if drawn is None:
            drawn = choose(rows[0].cpu(), request.sampling, request.prompt, running.new, course.banned())
        running.new.append(drawn.id)
        self.generated_tokens += 1
        taken = course.take(drawn.id)
        if taken.emit and request.sink.token(drawn):
            return self._finish(running, End.STOP)
        if taken.end:
            return self._finish(running, taken.end, closing=drawn if taken.closing else None)
        running.sequence.feed(taken.feed)
        return None

    def _finish(self, running: Running, reason: End, message: str = "", closing: Drawn | None = None) -> None:
        """Release the request's pages, then report the end."""
        for sequence in running.sequences:
            self.pages.give_back(sequence.pages)
            sequence.pages = []
        self.reserved -= running.need
        self.running.remove(running)
        running.request.sink.end(reason, message, closing)
