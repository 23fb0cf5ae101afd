"""Turn one part of the inputs into tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterctl.wire.data_requests import Recipe
from trainer.corpus.documents import Bad, documents, sentences
from trainer.corpus.filters import Sieve, content_hash
from trainer.corpus.indexed import token_type
from trainer.corpus.inputs import Part
from trainer.corpus.tokenizer import Tokenizer

# Descriptions of bad lines that a part keeps; all bad lines are counted.
BAD_KEPT_IN_PART = 20


@dataclass(frozen=True)
class EncodedPart:
    """The documents of a part as tokens."""

    number: int
    mark: str
    tokens: NDArray[Any]
    # The length of each sequence.
    lengths: NDArray[np.int32]
    # The number of sequences of each document.
    counts: NDArray[np.int32]
    hashes: bytes
    facts: dict[str, int]
    bad: list[str]
    slow: str
    """Why `tokenizers` encoded it, which is about ten times slower; empty if it did not."""


class Maker:
    """Encodes parts; each process has one."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        from trainer.corpus.encoder import encoder_for

        self.recipe = recipe
        self._vocab = tokenizer.vocab
        self._eod = tokenizer.eod
        self._dtype = token_type(tokenizer.vocab)
        self._encoder = encoder_for(tokenizer, 1)
        self._sieve = Sieve(recipe.filters)

    def make(self, part: Part) -> EncodedPart:
        facts: Counter[str] = Counter()
        bad: list[str] = []
        texts: list[str | list[int]] = []
        for piece in part.pieces:
            for document in documents(piece, self.recipe.key, self.recipe.each, self._vocab):
                if isinstance(document, Bad):
                    facts["bad"] += 1
                    bad += [str(document)] if len(bad) < BAD_KEPT_IN_PART else []
                    continue
                refusal = self._sieve.refusal(document)
                facts[refusal or "documents"] += 1
                if not refusal:
                    facts["characters"] += len(document) if isinstance(document, str) else 0
                    texts.append(document)
        tokens, lengths, counts = self._encoded(texts)
        facts["empty"] += int((counts == 0).sum())
        hashes = b"".join(map(content_hash, texts)) if self.recipe.dedup else b""
        slow = self._encoder.why
        return EncodedPart(part.number, part.mark, tokens, lengths, counts, hashes, dict(facts), bad, slow)

    def _encoded(
        self, texts: list[str | list[int]]
    ) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
        """Return all tokens, the length of each sequence (at least 1), and the number of sequences of each
        document (0 for an empty one)."""
        units: list[str | list[int]] = []
        counts = np.ones(len(texts), np.int64)
        for number, document in enumerate(texts):
            some = (
                sentences(document)
                if self.recipe.unit == "sentence" and isinstance(document, str)
                else [document]
            )
            units += some
            counts[number] = len(some)
        tokens, lengths = self._ids(units)
        owners = np.repeat(np.arange(len(texts)), counts)[lengths > 0]
        lengths = lengths[lengths > 0].astype(np.int64)
        counts = np.bincount(owners, minlength=len(texts))
        if self.recipe.append_eod:
            last = np.cumsum(counts)[counts > 0] - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self._eod)
            lengths[last] += 1
        return tokens, lengths.astype(np.int32), counts.astype(np.int32)

    def _ids(self, units: list[str | list[int]]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        texts = [unit for unit in units if isinstance(unit, str)]
        tokens, lengths = self._encoder.encode_many(texts)
        if len(texts) == len(units):
            return tokens.astype(self._dtype, copy=False), lengths
        ends = np.cumsum(lengths)
        encoded = iter(np.split(tokens, ends[:-1]) if len(texts) else [])
        rows = [next(encoded) if isinstance(unit, str) else np.asarray(unit, self._dtype) for unit in units]
        joined = np.concatenate(rows).astype(self._dtype) if rows else np.zeros(0, self._dtype)
        return joined, np.fromiter(map(len, rows), np.int32, len(rows))
