"""Turn texts into requests for a model with a limited window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import InputError
from trainer.evaluate.request import Example, Request
from trainer.samples.glm_windows import GlmTokens


@dataclass(frozen=True)
class Reader:
    """The tokenizer and the window of the evaluated model."""

    tokenizer: Tokenizer
    window: int
    """The most tokens that the model reads at a time."""
    glm: GlmTokens | None = None
    """GLM's special tokens, if the model is a GLM."""
    prefix: tuple[int, ...] = ()
    """The ids that precede a text."""

    @property
    def start(self) -> int:
        """Return the id before a text without a context: the tokenizer's `bos_token`, else its end."""
        return self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text after the prefix, unless the text begins with the first token already."""
        begins = text.startswith(self.tokenizer.token_of(self.start) or "\0")
        return [*(() if begins else self.prefix), *self.tokenizer.encode(text)]

    def continuation(self, context: str, target: str) -> tuple[Request, bool]:
        """Return the request for a target that continues a context, and whether the context was cut.

        As in lm-eval: spaces at the end of the context are moved to the target, context and target are encoded
        together, and an empty context becomes the token that begins a text.
        """
        if not context:
            return self.cut([self.start], self.tokenizer.encode(target))
        stripped = context.rstrip()
        context, target = stripped, context[len(stripped) :] + target
        whole = self.encode(context + target)
        before = self.encode(context) if context else list(self.prefix)
        ids = (before or [self.start], whole[len(before) :])
        return self.cut(*ids)

    def continuations(self, context: str, targets: Sequence[str]) -> Example:
        """Return the requests for several targets that continue a context."""
        pairs = [self.continuation(context, target) for target in targets]
        return Example(tuple(request for request, _ in pairs), any(cut for _, cut in pairs))

    def cut(self, context: Sequence[int], target: Sequence[int]) -> tuple[Request, bool]:
        """Return a request whose context keeps the last tokens that fit the window, and whether the context was cut."""
        room = self.window + 1 - len(target)
        if not target or room < 1:
            problem = f"a text to score has {len(target)} tokens, but the model reads {self.window} at most"
            raise InputError(problem, "score texts of at least one token that fit the window")
        return Request(tuple(context[-room:]), tuple(target)), len(context) > room

    def rolling(self, ids: Sequence[int], start: int) -> Example:
        """Return requests that score each token of a document once, in disjoint windows, as lm-eval does.

        The first window begins with the token `start`; the last is filled up with earlier tokens as context.
        """
        known, requests = [start, *ids], []
        for start in range(0, len(ids), self.window):
            end = min(start + self.window, len(ids))
            # `known` is shifted by one: known[i] precedes ids[i].
            first = max(0, end - self.window)
            requests.append(Request(tuple(known[first : start + 1]), tuple(ids[start:end])))
        return Example(tuple(requests))

    def overlapping(self, ids: Sequence[int], stride: int) -> Iterator[Request]:
        """Yield requests that score each token but the first, in windows that start every `stride` tokens.

        As in Megatron: the first window is scored whole, each later window only in its last `stride` tokens.
        """
        for start in range(0, max(1, len(ids) - 1), stride):
            scored = 1 if start == 0 else start + self.window + 1 - stride
            end = min(start + self.window + 1, len(ids))
            if scored < end:
                yield Request(tuple(ids[start:scored]), tuple(ids[scored:end]))

    def cloze_source(self, before: str, after: str) -> tuple[tuple[int, ...], int]:
        """Return the source of a cloze question (a text with one [MASK]) and the index of its mask."""
        assert self.glm is not None
        head = [self.glm.enc, *self.tokenizer.encode(before)]
        return (*head, self.glm.mask, *self.tokenizer.encode(after), self.glm.eos), len(head)

    def cloze(self, before: str, after: str, texts: Sequence[str]) -> Example:
        """Return the requests for the answers to a cloze question; refuse a question that does not fit the window."""
        source, mask = self.cloze_source(before, after)
        answers = [self.tokenizer.encode(f" {text}") for text in texts]
        length = len(source) + max(map(len, answers))
        if length > self.window:
            problem = f"a question has {length} tokens, but the model reads {self.window} at most"
            raise InputError(problem, "shorten it, or use a model with a longer window")
        return Example(tuple(Request(source, tuple(answer), mask) for answer in answers))
