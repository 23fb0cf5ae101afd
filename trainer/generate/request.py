"""A request to the batcher, its drawn tokens, and the sink that gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from trainer.generate.sampling import Drawn, Sampling


class End(str, Enum):
    """Why a text ends."""

    STOP = "stop"
    """An end of document, a stop text or a stop id."""
    LENGTH = "length"
    """The limit max_tokens, or the last position of the model."""
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Fed:
    """An input token and its positions; a GPT uses only the first position."""

    id: int
    first: int
    second: int = 0


@dataclass(frozen=True)
class Taken:
    """The effect of a drawn token."""

    emit: bool
    """Whether the token is part of the text."""
    feed: tuple[Fed, ...] = ()
    end: End | None = None
    closing: bool = False
    """Whether the token ends the text without being part of it."""


class Course(Protocol):
    """The rules of one text: which tokens it may contain, which input comes next, and when it ends."""

    source: int
    """The length of a prefix whose tokens all attend to each other; 0: no such prefix."""

    def begin(self) -> list[Fed]:
        """Return the prompt as input tokens."""

    def most(self) -> int:
        """Return the largest number of input tokens, prompt included."""

    def banned(self) -> Sequence[int]:
        """Return the ids that must not be drawn next."""

    def is_end(self, number: int) -> bool:
        """Return whether a token ends the text without being part of it."""

    def take(self, number: int) -> Taken:
        """Return the effect of a drawn token."""


class Sink(Protocol):
    """Receives the results of a request, in the batcher's thread."""

    def scored(self, prompt: Sequence[Drawn]) -> None:
        """Receive the log probabilities of the prompt's tokens, from the second token on."""

    def token(self, drawn: Drawn) -> bool:
        """Receive a token of the text; return whether the text must end here."""

    def end(self, reason: End, message: str = "", closing: Drawn | None = None) -> None:
        """Receive the end of the text, and the end token if one was drawn; no call follows."""


@dataclass
class Request:
    """A text to generate."""

    course: Course
    sampling: Sampling
    sink: Sink
    prompt: Sequence[int] = ()
    """The ids of the prompt; repetition penalties count them."""
    score_prompt: bool = False
    """Whether the log probabilities of the prompt are wanted; the prompt then shares no pages."""
    beams: Sequence[tuple[tuple[int, ...], float]] = ()
    """After a beam search: the ids and scores of the best texts."""
    cancelled: bool = False
    """May be set from any thread; the request's pages are released before the next step."""


class Continuation:
    """Continues a prompt with a GPT until an end id, a number of tokens, or the model's last position."""

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
            return Taken(False, end=End.STOP, closing=True)
        self._left -= 1
        if not self._left:
            return Taken(True, end=End.LENGTH)
        self._length += 1
        return Taken(True, (Fed(number, self._length - 1),))
