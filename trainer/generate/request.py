"""A request to the batcher, what is drawn for it, and where that goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from trainer.generate.sampling import Drawn, Sampling


class End(str, Enum):
    """Why a text ends."""

    STOP = "stop"
    """An end of document, or a stop text or id."""
    LENGTH = "length"
    """max_tokens, or the last position of the model."""
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Fed:
    """A token for the model, with its positions; a GPT has only the first of them."""

    id: int
    first: int
    second: int = 0


@dataclass(frozen=True)
class Taken:
    """What a drawn token leads to."""

    emit: bool
    """Whether the token is part of the text."""
    feed: tuple[Fed, ...] = ()
    end: End | None = None


class Course(Protocol):
    """Which tokens a text may have, what the model is given next, and when the text ends."""

    source: int
    """The length of a beginning whose tokens all see each other; 0: none."""

    def begin(self) -> list[Fed]:
        """Return the prompt."""

    def most(self) -> int:
        """Return the most tokens that the model is given, prompt included."""

    def banned(self) -> Sequence[int]:
        """Return the ids that must not be drawn next."""

    def is_end(self, number: int) -> bool:
        """Return whether a token ends the text and is no part of it."""

    def take(self, number: int) -> Taken:
        """Return what follows from a drawn token."""


class Sink(Protocol):
    """Gets what a request yields, in the thread of the batcher."""

    def scored(self, prompt: Sequence[Drawn]) -> None:
        """Take the log probabilities of the prompt's tokens, from the second one on."""

    def token(self, drawn: Drawn) -> bool:
        """Take a token of the text; return whether the text must end."""

    def end(self, reason: End, message: str = "") -> None:
        """Take the end; nothing follows."""


@dataclass
class Request:
    """A text to generate."""

    course: Course
    sampling: Sampling
    sink: Sink
    prompt: Sequence[int] = ()
    """The ids that penalties count as seen."""
    score_prompt: bool = False
    """Whether the log probabilities of the prompt are wanted; none of its pages is then taken from another."""
    beams: Sequence[tuple[tuple[int, ...], float]] = ()
    """After a beam search: the ids and scores of the best texts."""
    cancelled: bool = False
    """Set from any thread; the pages are free before the next step."""


class Continuation:
    """A GPT continues a prompt until an end, a number of tokens, or its last position."""

    source = 0

    def __init__(self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], window: int) -> None:
        self._prompt, self._ends = list(prompt), set(ends)
        self._window = window
        self._left = min(sampling.max_tokens, max(0, window - len(prompt)) + 1)
        self._length = len(prompt)

    def begin(self) -> list[Fed]:
        return [Fed(number, at) for at, number in enumerate(self._prompt)]

    def most(self) -> int:
        return min(self._window, self._length + self._left)

    def banned(self) -> Sequence[int]:
        return ()

    def is_end(self, number: int) -> bool:
        return number in self._ends

    def take(self, number: int) -> Taken:
        if number in self._ends:
            return Taken(False, end=End.STOP)
        self._left -= 1
        if not self._left:
            return Taken(True, end=End.LENGTH)
        self._length += 1
        return Taken(True, (Fed(number, self._length - 1),))
