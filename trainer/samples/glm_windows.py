"""GLM samples: windows of documents, drawn in proportion to document length, each determined by its number.

GLM's own loader restarts its random generators with every process: a resumed run repeats what it has read,
and another number of ranks reads other samples. Here sample k is a function of the seed and of k only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from trainer.corpus.indexed import Corpus
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError, InputError

SENTENCE_ENDS = frozenset(".?!;:\n。？！；：…")


@dataclass(frozen=True)
class GlmTokens:
    """The ids that GLM adds to a vocabulary; `eos` is the end of a document and also the padding."""

    eos: int
    sop: int
    eop: int
    enc: int
    mask: int
    sep: int
    unk: int
    # gMASK: the rest of a text.
    gap: int
    # sMASK: whole sentences.
    sentence: int
    # dBLOCK: replaces a generated token that is hidden from itself.
    block: int

    @classmethod
    def above(cls, vocab: int, eos: int) -> GlmTokens:
        """Return the ids in GLM's order above a vocabulary: 50,257 to 50,265 for GPT-2's vocabulary of
        50,257."""
        return cls(eos, *range(vocab, vocab + 9))

    @property
    def vocab(self) -> int:
        """The size of the vocabulary: ids are in [0, vocab)."""
        return self.block + 1


def sentence_ends(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return for each id whether its text contains the end of a sentence."""
    ids = range(tokenizer.vocab)
    return np.fromiter((not SENTENCE_ENDS.isdisjoint(tokenizer.decode([id])) for id in ids), np.bool_)


def generator(seed: int, *numbers: int) -> RandomState:
    """Return a random generator of its own for a sample and purpose; NumPy keeps this generator's stream
    stable."""
    seeds = [seed, *numbers]
    return RandomState([part for word in seeds for part in (word & 0xFFFFFFFF, word >> 32)])


@dataclass(frozen=True)
class Sampling:
    """How a window is cut."""

    def __post_init__(self) -> None:
        if self.length < 4 or not 0 <= self.short_chance <= 1:
            problem = f"samples of {self.length} tokens, shortened with a chance of {self.short_chance}"
            raise InputError(problem, "use at least 4 tokens, and a chance in [0,1]")

    length: int = 512
    """The largest number of tokens in a sample, including ENC and the end of the document."""
    short_chance: float = 0.02
    """The probability that a sample is cut to a length in [32, length - 1)."""
    sentence_start: bool = True
    """Whether a window in a long document starts after the end of a sentence, if there is one nearby."""
    across_documents: bool = True
    """Whether further documents follow a short one until the sample is full."""


SHORTEST = 32


class Document:
    """The tokens of a document as stored, with an end token added if it has none; read in parts.

    A sample of a book with a million tokens needs only a few hundred of them.
    """

    def __init__(self, tokens: NDArray[Any], eos: int) -> None:
        self.tokens, self.eos = tokens, eos
        self._length = len(tokens) + int(tokens[-1] != eos)

    def __len__(self) -> int:
        return self._length

    def part(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens [start, stop), fewer at the end of the document."""
        text = self.tokens[start:stop].astype(np.int64)
        return np.append(text, self.eos) if stop > len(self.tokens) < self._length else text


class GlmSamples:
    """An endless sequence of samples of one corpus; each starts with ENC, and so does each document in it."""

    def __init__(
        self,
        corpus: Corpus,
        tokens: GlmTokens,
        ends: NDArray[np.bool_],
        seed: int,
        sampling: Sampling,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """Set up the samples: `ends` marks ids that end a sentence; `bounds` limits the documents, all by
        default."""
        self.corpus, self.tokens, self.seed, self.sampling = corpus, tokens, seed, sampling
        # Include GLM's own tokens, which end no sentence.
        self.ends = np.zeros(max(len(ends), tokens.vocab), np.bool_)
        self.ends[: len(ends)] = ends
        first, last = bounds or (0, corpus.documents)
        offsets = np.append(corpus.offsets, len(corpus.tokens))
        # Document d holds the tokens [edges[d], edges[d + 1]).
        self.edges = offsets[corpus.marks[first : last + 1]]
        if last <= first or self.edges[-1] == self.edges[0]:
            problem = f"{corpus.prefix}: its documents [{first},{last}) have no tokens"
            raise DataError(problem, "use another split, or more documents")

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """Return sample `number` as token ids: at least two, at most `sampling.length`."""
        random = generator(self.seed, number)
        limit = self._limit(random)
        document = self._document(random)
        if len(document) > limit - 1:
            start = self._start(document, limit, random)
            return self._cut(self._opened(document.part(start, start + limit)), limit)
        parts = [self._opened(document.part(0, limit))]
        room = limit - len(parts[0])
        while self.sampling.across_documents and room > 2:
            document = self._document(random)
            parts.append(self._cut(self._opened(document.part(0, room)), room))
            room -= len(document) + 1
        return np.concatenate(parts)

    def _limit(self, random: RandomState) -> int:
        longest = self.sampling.length
        is_short = random.random_sample() < self.sampling.short_chance
        return int(random.randint(SHORTEST, longest - 1)) if is_short and longest > SHORTEST + 1 else longest

    def _document(self, random: RandomState) -> Document:
        """Return a document, drawn in proportion to its length, and its end."""
        position = int(random.randint(self.edges[0], self.edges[-1], dtype=np.int64))
        number = int(np.searchsorted(self.edges, position, side="right")) - 1
        return Document(self.corpus.tokens[self.edges[number] : self.edges[number + 1]], self.tokens.eos)

    def _start(self, document: Document, limit: int, random: RandomState) -> int:
        """Return where a window starts in a text that is too long: a random position, moved to the start of
        a sentence."""
        start = int(random.randint(0, len(document) - limit + 2))
        backwards = random.random_sample() < 0.5
        if not self.sampling.sentence_start or start == 0:
            return start
        # Steps.
        most = limit // 2
        if backwards:
            before = document.part(max(0, start - most - 1), start)
            found = np.flatnonzero(self.ends[before])
            if len(found):
                return start - len(before) + int(found[-1]) + 1
            return max(0, start - most)
        found = np.flatnonzero(self.ends[document.part(start - 1, start + most)])
        return min(start + (int(found[0]) if len(found) else most), len(document) - 2)

    def _opened(self, text: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.concatenate([[self.tokens.enc], text])

    def _cut(self, text: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
        """Return at most `limit` tokens: up to the last end of a sentence, unless less than half would
        remain."""
        if len(text) <= limit:
            return text
        found = np.flatnonzero(self.ends[text[:limit]])
        whole = int(found[-1]) + 1 if len(found) else 0
        return text[: whole if whole >= max(2, limit // 2) else limit]


def stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return rows of different lengths as one array, padded with zeros at the end."""
    longest = max(row.shape[-1] for row in rows)
    out = np.zeros((len(rows), *rows[0].shape[:-1], longest), rows[0].dtype)
    for target, row in zip(out, rows, strict=True):
        target[..., : row.shape[-1]] = row
    return out
