"""GLM's blank infilling: parts of a sample are taken out, and are what the model learns to write.

A row is the source, in which a mask token stands for each span, and after it the spans, each behind a start-of-
piece token. The source is seen whole from everywhere, a span from itself and from those after it; so a row's
attention is one number, `separator`, the length of its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from trainer.config.glm import Infilling
from trainer.samples.glm_windows import (
    GlmSamples,
    GlmTokens,
    generator,
    stacked,
)

MODES = ("words", "sentences", "rest")
# Spans of words are shorter.
LONGEST_SPAN = 40
# Keeps the choices of a row apart from those of the sample it is made of.
BLANKS = 1

Ids = NDArray[np.int64]
# Half-open.
Span = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One sample, its blanks taken out; `positions` is (2, length): in the source, and in the span."""

    tokens: Ids
    targets: Ids
    loss_mask: NDArray[np.float32]
    positions: Ids
    separator: int
    mode: str


@dataclass(frozen=True)
class GlmBatch:
    """A micro-batch, filled up with zeros to its longest row."""

    tokens: Ids  # (batch, length)
    targets: Ids
    loss_mask: NDArray[np.float32]
    positions: Ids  # (batch, 2, length)
    separators: Ids  # (batch,)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """In the order in which the model takes them."""
        return self.tokens, self.targets, self.loss_mask, self.positions, self.separators


class GlmBatches:
    """Rows by sample number, and micro-batches of them."""

    def __init__(self, samples: GlmSamples, infilling: Infilling) -> None:
        self.samples, self.infilling = samples, infilling
        self.reach = np.cumsum(span_chances(infilling.span))

    def row(self, number: int) -> Row:
        random = generator(self.samples.seed, number, BLANKS)
        return self._infilled(self.samples[number], random)

    def read(self, numbers: Sequence[int]) -> GlmBatch:
        """The micro-batch of these samples; it is the same in whatever company each of them is."""
        return batch_of([self.row(number) for number in numbers])

    def _infilled(self, text: Ids, random: RandomState) -> Row:
        words, share = self.samples.tokens, self.infilling
        chance = random.random_sample()
        if chance < share.words:
            spans = place_spans(text, self._lengths(len(text), random), words, share.ratio, random)
            if spans:
                return blanked(text, spans, words.mask, words, random, "words", share.shuffle, share.hide)
        elif chance < share.words + share.sentences:
            spans = self._sentences(text, random)
            if spans:
                return blanked(text, spans, words.sentence, words, random, "sentences", share.shuffle)
        return self._rest(text, random)

    def _lengths(self, length: int, random: RandomState) -> list[int]:
        """Lengths of short spans, together a part of the sample."""
        wanted, lengths = max(1, int(self.infilling.ratio * length)), list[int]()
        single = random.random_sample() < self.infilling.one_span
        while sum(lengths) < wanted and not (single and lengths):
            lengths.append(int(np.searchsorted(self.reach, random.random_sample(), side="right")) + 1)
        random.shuffle(lengths)
        return lengths

    def _sentences(self, text: Ids, random: RandomState) -> list[Span]:
        """Whole sentences, drawn until a part of the sample is taken."""
        found = sentence_spans(text, self.samples.ends, self.samples.tokens)
        wanted, taken, spans = int(self.infilling.ratio * len(text)), 0, list[Span]()
        for place in random.permutation(len(found)):
            spans.append(found[place])
            taken += found[place][1] - found[place][0]
            if taken >= wanted:
                break
        return spans

    def _rest(self, text: Ids, random: RandomState) -> Row:
        words, share = self.samples.tokens, self.infilling
        most = max(1, len(text) - 2)
        least = min(most, max(1, int(share.least_rest * len(text))))
        length = int(random.randint(least, most + 1))
        at_the_end = random.random_sample() < share.inside
        if at_the_end or words.eos in text[:-1]:
            return continued(text, len(text) - length, words)
        spans = place_spans(text, [length], words, 1.0, random)
        if not spans:
            return continued(text, len(text) - length, words)
        return blanked(text, spans, words.gap, words, random, "rest", share.shuffle)


def batch_of(rows: Sequence[Row]) -> GlmBatch:
    """Rows as one micro-batch."""
    return GlmBatch(
        stacked([row.tokens for row in rows]),
        stacked([row.targets for row in rows]),
        stacked([row.loss_mask for row in rows]),
        stacked([row.positions for row in rows]),
        np.array([row.separator for row in rows]),
    )


def span_chances(mean: float) -> NDArray[np.float64]:
    """Of the lengths 1 to 39, by a Poisson distribution without its other lengths."""
    lengths = np.arange(1, LONGEST_SPAN)
    logarithms = lengths * np.log(mean) - np.cumsum(np.log(lengths))
    chances = np.exp(logarithms - logarithms.max())
    normal: NDArray[np.float64] = chances / chances.sum()
    return normal


def regions(text: Ids, words: GlmTokens) -> list[Span]:
    """Where spans may lie: each document of a sample without its ENC and its end; the shortest first."""
    outside = np.isin(text, (words.enc, words.eos))
    edges = np.flatnonzero(np.diff(np.concatenate([[True], outside, [True]]).astype(np.int8)))
    found = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return sorted(found, key=lambda span: span[1] - span[0])


def place_spans(
    text: Ids, lengths: Sequence[int], words: GlmTokens, ratio: float, random: RandomState
) -> list[Span]:
    """Spans of these lengths over a sample's documents, at least one token between two of them.

    A document takes its part of what is masked, the longest what is left; a span that fits nowhere is left out.
    """
    left, spans = list(lengths), list[Span]()
    found = regions(text, words)
    for place, (start, end) in enumerate(found):
        is_last = place == len(found) - 1
        room = end - start if is_last else int(ratio * (end - start))
        taken = list[int]()
        while left and sum(taken) + left[0] + (len(taken) if is_last else 0) <= room:
            taken.append(left.pop(0))
        spans += _spread(taken, start, end, random)
    return spans


def _spread(lengths: Sequence[int], start: int, end: int, random: RandomState) -> list[Span]:
    """Spans by chance within [start, end), in this order."""
    free = end - start - sum(lengths) - len(lengths) + 1
    places = sorted(int(place) for place in random.randint(0, free + 1, len(lengths)))
    spans = []
    for place, length in zip(places, lengths, strict=True):
        spans.append((start + place, start + place + length))
        start += length + 1
    return spans


def sentence_spans(text: Ids, ends: NDArray[np.bool_], words: GlmTokens) -> list[Span]:
    """The sentences of a sample; ENC and the end of a document belong to none."""
    spans = list[Span]()
    for start, end in sorted(regions(text, words)):
        stops = (np.flatnonzero(ends[text[start:end]]) + start + 1).tolist()
        edges = [start, *stops] if stops and stops[-1] == end else [start, *stops, end]
        spans += pairwise(edges)
    return spans


def blanked(
    text: Ids,
    spans: Sequence[Span],
    mask: int,
    words: GlmTokens,
    random: RandomState,
    mode: str,
    shuffle: bool = True,
    hide: float = 0.0,
) -> Row:
    """A row with `mask` in the place of each span, and the spans behind the source, each ended by eop."""
    ordered = sorted(spans)
    source, places, reached = list[Ids](), list[int](), 0
    for start, end in ordered:
        source += [text[reached:start], np.array([mask])]
        reached = end
        places.append(sum(len(part) for part in source) - 1)
    source.append(text[reached:])
    whole = np.concatenate(source)
    order = random.permutation(len(ordered)) if shuffle else np.arange(len(ordered))
    inputs, targets = [whole], [whole]
    first, second = [np.arange(len(whole))], [np.zeros(len(whole), np.int64)]
    for i in order:
        start, end = ordered[i]
        span = text[start:end]
        hidden = random.random_sample(len(span)) < hide if hide else np.zeros(len(span), np.bool_)
        inputs += [np.array([words.sop]), np.where(hidden, words.block, span)]
        targets += [span, np.array([words.eop])]
        first.append(np.full(len(span) + 1, places[i]))
        second.append(np.arange(1, len(span) + 2))
    positions = np.stack([np.concatenate(first), np.concatenate(second)])
    return _row(np.concatenate(inputs), np.concatenate(targets), positions, len(whole), mode)


def continued(text: Ids, division: int, words: GlmTokens) -> Row:
    """A row that goes on from the first `division` tokens to the sample's end, without an end of piece."""
    source = np.append(text[:division], words.gap)
    target = text[division:]
    inputs = np.concatenate([source, [words.sop], target[:-1]])
    positions = np.zeros((2, len(inputs)), np.int64)
    positions[0] = np.minimum(np.arange(len(inputs)), division)
    positions[1, len(source) :] = np.arange(1, len(target) + 1)
    return _row(inputs, np.concatenate([source, target]), positions, len(source), "rest")


def _row(tokens: Ids, targets: Ids, positions: Ids, separator: int, mode: str) -> Row:
    loss_mask = (np.arange(len(tokens)) >= separator).astype(np.float32)
    return Row(tokens, targets, loss_mask, positions, separator, mode)
