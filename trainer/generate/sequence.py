"""A sequence in the cache: its tokens, its pages, and how many of its tokens are computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from native.decode.paged import PAGE
from trainer.generate.modules import Step
from trainer.generate.network import Network, spans_of
from trainer.generate.pages import Pages
from trainer.generate.request import Fed


@dataclass
class CachedSequence:
    """Tokens, and the pages with the keys and values of the computed tokens."""

    source: int = 0
    ids: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    second: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    known: int = 0
    """The number of first pages that other prompts can find."""

    def feed(self, tokens: Iterable[Fed]) -> None:
        for token in tokens:
            self.ids.append(token.id)
            self.first.append(token.first)
            self.second.append(token.second)

    def fork(self, pages: Pages) -> CachedSequence:
        """Return a sequence with the same tokens that shares all pages of this one."""
        for page in self.pages:
            pages.share(page)
        ids, first, second = list(self.ids), list(self.first), list(self.second)
        return replace(self, ids=ids, first=first, second=second, pages=list(self.pages))

    def make_room(self, end: int, pages: Pages, network: Network) -> None:
        """Get pages for the positions up to `end`; copy a shared page before it is written."""
        at = self.computed // PAGE
        if at < len(self.pages) and pages.is_shared(self.pages[at]):
            copy = pages.take()
            network.copy_page(self.pages[at], copy)
            pages.give_back([self.pages[at]])
            self.pages[at] = copy
        while len(self.pages) * PAGE < end:
            self.pages.append(pages.take())


@dataclass(frozen=True)
class Part:
    """The new tokens [begin, end) that a step computes of a sequence."""

    sequence: CachedSequence
    begin: int
    end: int
    all_logits: bool = False

    @property
    def completes(self) -> bool:
        return self.end == len(self.sequence.ids)


def step_of(parts: Sequence[Part], is_glm: bool, window: int = 0) -> Step:
    """Return the step that computes these parts; it returns the logits of `wanted_rows` tokens of each."""
    ids = [number for part in parts for number in part.sequence.ids[part.begin : part.end]]
    positions = [[at for part in parts for at in part.sequence.first[part.begin : part.end]]]
    if is_glm:
        positions.append([at for part in parts for at in part.sequence.second[part.begin : part.end]])
    wanted, offset = list[int](), 0
    for part in parts:
        size = part.end - part.begin
        if part.all_logits:
            wanted += range(offset, offset + size)
        elif part.completes:
            wanted.append(offset + size - 1)
        offset += size
    spans = spans_of(
        [part.sequence.pages for part in parts],
        [(part.begin, part.end) for part in parts],
        [part.sequence.source for part in parts],
        window,
    )
    at = torch.tensor(positions if is_glm else positions[0])
    return Step(torch.tensor(ids), at, spans, torch.tensor(wanted, dtype=torch.int64))


def wanted_rows(part: Part) -> int:
    """Return for how many tokens of a part the logits are computed."""
    return part.end - part.begin if part.all_logits else int(part.completes)
