"""GLM's blank infilling: spans are removed from a sample, and the model learns to generate them.

A row is the source, in which a mask token replaces each span, followed by the spans, each after a
start-of-piece token. Every position sees the whole source; a position in a span sees its own span and the
spans before it. One number therefore describes a row's attention: `separator`, the length of its source.
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

# Spans of words are shorter than this.
LONGEST_SPAN = 40
# Separates the random choices of a row from those of the sample that it is made of.
BLANKS = 1

Ids = NDArray[np.int64]
# Half-open.
Span = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One sample with its blanks removed; `positions` is (2, length): position in the source, position in
    the span."""

    tokens: Ids
    targets: Ids
    loss_mask: NDArray[np.float32]
    positions: Ids
    separator: int
    mode: str


@dataclass(frozen=True)
class GlmBatch:
    """A micro-batch, padded with zeros to its longest row."""

    tokens: Ids  # (batch, length)
    targets: Ids
    loss_mask: NDArray[np.float32]
    positions: Ids  # (batch, 2, length)
    separators: Ids  # (batch,)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the order in which the model takes them."""
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
        """Return the micro-batch of these samples; a row does not depend on the other rows of its batch."""
        return batch_of([self.row(number) for number in numbers])

    def _infilled(self, text: Ids, random: RandomState) -> Row:
        tokens, share = self.samples.tokens, self.infilling
        chance = random.random_sample()
        if chance < share.words:
            spans = place_spans(text, self._lengths(len(text), random), tokens, share.ratio, random)
            if spans:
                return blanked(text, spans, tokens.mask, tokens, random, "words", share.shuffle, share.hide)
        elif chance < share.words + share.sentences:
            spans = self._sentences(text, random)
            if spans:
                return blanked(text, spans, tokens.sentence, tokens, random, "sentences", share.shuffle)
        return self._rest(text, random)

    def _lengths(self, length: int, random: RandomState) -> list[int]:
        """Return lengths of short spans that together make up the requested part of the sample."""
        wanted, lengths = max(1, int(self.infilling.ratio * length)), list[int]()
        single = random.random_sample() < self.infilling.one_span
        while sum(lengths) < wanted and not (single and lengths):
            lengths.append(int(np.searchsorted(self.reach, random.random_sample(), side="right")) + 1)
        random.shuffle(lengths)
        return lengths

    def _sentences(self, text: Ids, random: RandomState) -> list[Span]:
        """Return whole sentences, drawn until the requested part of the sample is covered."""
        found = sentence_spans(text, self.samples.ends, self.samples.tokens)
        wanted, taken, spans = int(self.infilling.ratio * len(text)), 0, list[Span]()
        for index in random.permutation(len(found)):
            spans.append(found[index])
            taken += found[index][1] - found[index][0]
            if taken >= wanted:
                break
        return spans

    def _rest(self, text: Ids, random: RandomState) -> Row:
        tokens, share = self.samples.tokens, self.infilling
        most = max(1, len(text) - 2)
        least = min(most, max(1, int(share.least_rest * len(text))))
        length = int(random.randint(least, most + 1))
        at_the_end = random.random_sample() < share.inside
        if at_the_end or tokens.eos in text[:-1]:
            return continued(text, len(text) - length, tokens)
        spans = place_spans(text, [length], tokens, 1.0, random)
        if not spans:
            return continued(text, len(text) - length, tokens)
        return blanked(text, spans, tokens.gap, tokens, random, "rest", share.shuffle)


def batch_of(rows: Sequence[Row]) -> GlmBatch:
    """Return rows as one padded micro-batch."""
    return GlmBatch(
        stacked([row.tokens for row in rows]),
        stacked([row.targets for row in rows]),
        stacked([row.loss_mask for row in rows]),
        stacked([row.positions for row in rows]),
        np.array([row.separator for row in rows]),
    )


def span_chances(mean: float) -> NDArray[np.float64]:
    """Return the probabilities of the lengths 1 to 39 in a Poisson distribution restricted to them."""
    lengths = np.arange(1, LONGEST_SPAN)
    logarithms = lengths * np.log(mean) - np.cumsum(np.log(lengths))
    chances = np.exp(logarithms - logarithms.max())
    normal: NDArray[np.float64] = chances / chances.sum()
    return normal


def regions(text: Ids, tokens: GlmTokens) -> list[Span]:
    """Return where spans may lie: each document of a sample without its ENC and end tokens, shortest first."""
    outside = np.isin(text, (tokens.enc, tokens.eos))
    edges = np.flatnonzero(np.diff(np.concatenate([[True], outside, [True]]).astype(np.int8)))
    found = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return sorted(found, key=lambda span: span[1] - span[0])


def place_spans(
    text: Ids, lengths: Sequence[int], tokens: GlmTokens, ratio: float, random: RandomState
) -> list[Span]:
    """Place spans of these lengths in the documents of a sample, with at least one token between two spans.

    Each document gets its proportional part of the masked tokens, the longest document the rest. A span
    that fits nowhere is left out.
    """
    left, spans = list(lengths), list[Span]()
    found = regions(text, tokens)
    for index, (start, end) in enumerate(found):
        is_last = index == len(found) - 1
        room = end - start if is_last else int(ratio * (end - start))
        taken = list[int]()
        while left and sum(taken) + left[0] + (len(taken) if is_last else 0) <= room:
            taken.append(left.pop(0))
        spans += _spread(taken, start, end, random)
    return spans


def _spread(lengths: Sequence[int], start: int, end: int, random: RandomState) -> list[Span]:
    """Return spans placed at random within [start, end), in this order."""
    free = end - start - sum(lengths) - len(lengths) + 1
    places = sorted(int(position) for position in random.randint(0, free + 1, len(lengths)))
    spans = []
    for position, length in zip(places, lengths, strict=True):
        spans.append((start + position, start + position + length))
        start += length + 1
    return spans


def sentence_spans(text: Ids, ends: NDArray[np.bool_], tokens: GlmTokens) -> list[Span]:
    """Return the sentences of a sample; ENC and end-of-document tokens belong to no sentence."""
    spans = list[Span]()
    for start, end in sorted(regions(text, tokens)):
        stops = (np.flatnonzero(ends[text[start:end]]) + start + 1).tolist()
        edges = [start, *stops] if stops and stops[-1] == end else [start, *stops, end]
        spans += pairwise(edges)
    return spans


def blanked(
    text: Ids,
    spans: Sequence[Span],
    mask: int,
    tokens: GlmTokens,
    random: RandomState,
    mode: str,
    shuffle: bool = True,
    hide: float = 0.0,
) -> Row:
    """Return a row with `mask` in place of each span, and the spans after the source, each ended by eop."""
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
        inputs += [np.array([tokens.sop]), np.where(hidden, tokens.block, span)]
        targets += [span, np.array([tokens.eop])]
        first.append(np.full(len(span) + 1, places[i]))
        second.append(np.arange(1, len(span) + 2))
    positions = np.stack([np.concatenate(first), np.concatenate(second)])
    return _row(np.concatenate(inputs), np.concatenate(targets), positions, len(whole), mode)


def continued(text: Ids, division: int, tokens: GlmTokens) -> Row:
    """Return a row that continues from the first `division` tokens to the end of the sample, without an eop
    token."""
    source = np.append(text[:division], tokens.gap)
    target = text[division:]
    inputs = np.concatenate([source, [tokens.sop], target[:-1]])
    positions = np.zeros((2, len(inputs)), np.int64)
    positions[0] = np.minimum(np.arange(len(inputs)), division)
    positions[1, len(source) :] = np.arange(1, len(target) + 1)
    return _row(inputs, np.concatenate([source, target]), positions, len(source), "rest")


def _row(tokens: Ids, targets: Ids, positions: Ids, separator: int, mode: str) -> Row:
    loss_mask = (np.arange(len(tokens)) >= separator).astype(np.float32)
    return Row(tokens, targets, loss_mask, positions, separator, mode)
