"""Beam search: find the texts with the best score, which is log probability / length ** penalty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.generate.pages import Pages
from trainer.generate.request import End, Fed, Request
from trainer.generate.sampling import Drawn, adjusted
from trainer.generate.sequence import CachedSequence


@dataclass(frozen=True)
class Text:
    """A finished text and its score."""

    ids: tuple[int, ...]
    score: float
    end: End


class Beams:
    """The beams of a request. At the end its sink gets the tokens of the best text."""

    def __init__(self, request: Request, prompt: CachedSequence, pages: Pages) -> None:
        self.request, self.pages = request, pages
        self.sequences = [prompt]
        self.sums = [0.0]
        self.new: list[tuple[int, ...]] = [()]
        self.finished: list[Text] = []
        self._most = request.course.most() - len(prompt.ids)

    def advance(self, rows: Sequence[Tensor]) -> End | None:
        """Extend all beams by their next logits; return why the search ends, or None if it continues."""
        sampling, width = self.request.sampling, self.request.sampling.beams
        scores = [
            torch.log_softmax(adjusted(row, sampling, self.request.prompt, new).double(), -1) + total
            for row, new, total in zip(rows, self.new, self.sums, strict=True)
        ]
        vocab = len(scores[0])
        values, places = torch.cat(scores).topk(min(2 * width, vocab * len(scores)))
        chosen: list[tuple[int, int, float]] = []
        length = len(self.new[0]) + 1
        for rank, (value, index) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            beam, number = divmod(index, vocab)
            if self._ends(number):
                if rank < width:
                    self._add(self.new[beam], value, length, End.STOP)
            elif len(chosen) < width:
                chosen.append((beam, number, value))
        done = length >= min(sampling.max_tokens, self._most)
        if done or not chosen or self._nothing_better(values[0].item(), length):
            if done:
                for beam, number, value in chosen:
                    self._add((*self.new[beam], number), value, length, End.LENGTH)
            return self._deliver()
        self._continue(chosen)
        return None

    def texts(self) -> list[Text]:
        """Return the finished texts, best first."""
        return sorted(self.finished, key=lambda text: -text.score)[: self.request.sampling.beams]

    def _ends(self, number: int) -> bool:
        return self.request.course.is_end(number)

    def _add(self, ids: tuple[int, ...], total: float, length: int, end: End) -> None:
        self.finished.append(Text(ids, total / length**self.request.sampling.length_penalty, end))
        self.finished = self.texts()

    def _nothing_better(self, best: float, length: int) -> bool:
        width = self.request.sampling.beams
        reachable = best / length**self.request.sampling.length_penalty
        return len(self.finished) >= width and self.finished[-1].score >= reachable

    def _continue(self, chosen: Sequence[tuple[int, int, float]]) -> None:
        old, self.sequences = self.sequences, []
        for beam, number, _ in chosen:
            sequence = old[beam].fork(self.pages)
            sequence.feed([Fed(number, len(sequence.ids))])
            self.sequences.append(sequence)
        for sequence in old:
            self.pages.give_back(sequence.pages)
        self.new = [(*self.new[beam], number) for beam, number, _ in chosen]
        self.sums = [value for *_, value in chosen]

    def _deliver(self) -> End:
        texts = self.texts()
        best = texts[0]
        self.request.beams = [(text.ids, text.score) for text in texts]
        for number in best.ids:
            if self.request.sink.token(Drawn(number)):
                return End.STOP
        return best.end
