"""Decode ids to text as they arrive, in whole characters; the text ends before the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.corpus.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_RECENT = 8
"""How many earlier ids are decoded again with each new id."""


class Detokenizer:
    """Decodes ids one by one; the results of `push` and `end` add up to the text of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = 0
        """How many characters of the text of `_ids` were already returned."""

    def push(self, number: int) -> str:
        """Add an id; return the new final text. An unfinished character waits for the next id."""
        self._ids.append(number)
        text = self._tokenizer.decode(self._ids)
        certain = text.removesuffix(UNFINISHED)
        new, self._done = certain[self._done :], max(self._done, len(certain))
        if certain == text and len(self._ids) > 4 * _RECENT:
            self._shorten(text)
        return new

    def end(self) -> str:
        """Return the rest: an unfinished character becomes a replacement character."""
        return self._tokenizer.decode(self._ids)[self._done :]

    def _shorten(self, text: str) -> None:
        """Drop old ids, up to an id at which a character begins."""
        for begin in range(len(self._ids) - _RECENT, len(self._ids) - 1):
            rest = self._tokenizer.decode(self._ids[begin:])
            if rest and text.endswith(rest) and not rest.startswith(UNFINISHED):
                self._ids, self._done = self._ids[begin:], len(rest)
                return


class StopTexts:
    """Passes text on until the first stop text; holds back text that may be the beginning of a stop text."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = ""

    def push(self, text: str) -> str:
        """Add text; return the text that can be passed on. Sets `found` when a stop text occurs."""
        if self.found:
            return ""
        self._held += text
        places = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if places:
            at, self.found = min(places)
            passed, self._held = self._held[:at], ""
            return passed
        hold = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        passed, self._held = self._held[: len(self._held) - hold], self._held[len(self._held) - hold :]
        return passed

    def end(self) -> str:
        """Return the text that was held back."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )
