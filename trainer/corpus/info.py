"""Describe a pair: counts, document lengths, the beginnings of some documents, epochs of a token budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterctl.wire.pair import Manifest, TokenizerRecord
from trainer.corpus.build import entropy
from trainer.corpus.indexed import Corpus, bin_path, open_corpus
from trainer.corpus.tokenizer import Tokenizer
from trainer.corpus.verify import other_tokenizer, read_manifest, token_pieces
from trainer.errors import DataError, InputError

SAMPLE_TOKENS = 48


# Units of a number of tokens.
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def token_count(text: str) -> int:
    """Return a number of tokens written as 2500000000, 2.5e9, 2.5B or 300_000M."""
    unit = UNITS.get(text[-1:].lower(), 1)
    try:
        return int(float((text[:-1] if unit > 1 else text).replace("_", "").replace(",", "")) * unit)
    except (ValueError, OverflowError):
        raise InputError(
            f"--tokens {text}: is not a number of tokens", "as in 2.5B, 300e9 or 26000000000"
        ) from None


@dataclass(frozen=True)
class LengthRange:
    """How many documents have a number of tokens in [first, below)."""

    first: int
    below: int
    documents: int


@dataclass(frozen=True)
class Epochs:
    """How many times a budget of tokens passes over the corpus; None for an empty corpus."""

    tokens: int
    epochs: float | None


@dataclass(frozen=True)
class DocumentSample:
    """The beginning of a document."""

    document: int
    tokens: int
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class CorpusInfo:
    """Everything that `data info` shows. A field is None if only a manifest has the value and there is none."""

    prefix: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    token_type: str
    bytes: int
    largest_id: int
    shortest: int
    longest: int
    document_lengths: tuple[LengthRange, ...]
    median_document: int
    unigram_entropy_nats: float
    eod: int | None
    ends_in: int | None
    """The id at the end of every document, if it is the same."""
    vocab: int | None
    tokenizer: TokenizerRecord | None
    epochs: Epochs | None
    samples: tuple[DocumentSample, ...]
    idx_sha256: str

    def as_json(self) -> dict[str, object]:
        lengths = [
            {"from": entry.first, "below": entry.below, "documents": entry.documents}
            for entry in self.document_lengths
        ]
        return {**asdict(self), "document_lengths": lengths}


def describe(
    prefix: Path, tokenizer: Path | None = None, samples: int = 0, budget: int = 0, eod: str = ""
) -> CorpusInfo:
    """Return everything that `data info` shows. Samples need a tokenizer: the given one, or the one that the
    manifest names."""
    corpus = open_corpus(prefix)
    manifest, _ = read_manifest(prefix)
    counts = _id_counts(corpus)
    lengths = document_lengths(corpus)
    decoder = _tokenizer(prefix, tokenizer, manifest, samples, eod)
    return CorpusInfo(
        prefix=str(prefix),
        documents=corpus.documents,
        empty_documents=int((lengths == 0).sum()),
        sequences=len(corpus.lengths),
        tokens=len(corpus.tokens),
        token_type=corpus.tokens.dtype.name,
        bytes=bin_path(prefix).stat().st_size,
        largest_id=len(counts) - 1,
        shortest=int(corpus.lengths.min()) if len(corpus.lengths) else 0,
        longest=int(corpus.lengths.max(initial=0)),
        document_lengths=tuple(histogram(lengths)),
        median_document=int(np.median(lengths)) if len(lengths) else 0,
        unigram_entropy_nats=entropy(counts) if len(counts) else 0.0,
        eod=manifest.eod if manifest else None,
        ends_in=_common_end(corpus),
        vocab=manifest.vocab if manifest else None,
        tokenizer=manifest.tokenizer if manifest else None,
        epochs=epochs(budget, len(corpus.tokens)) if budget else None,
        samples=tuple(_samples(corpus, decoder, samples)) if decoder else (),
        idx_sha256=corpus.identity(),
    )


def document_lengths(corpus: Corpus) -> NDArray[np.int64]:
    """Return the number of tokens of each document."""
    ends = np.concatenate([[0], np.cumsum(corpus.lengths, dtype=np.int64)])
    return np.diff(ends[corpus.marks])


def histogram(lengths: NDArray[np.int64]) -> list[LengthRange]:
    """Return how many documents have [from, below) tokens, by powers of two."""
    if not len(lengths):
        return []
    powers = np.zeros(len(lengths), np.int64)
    powers[lengths > 0] = np.log2(lengths[lengths > 0]).astype(np.int64) + 1
    counts = np.bincount(powers)
    return [
        LengthRange(0 if not power else 1 << (power - 1), 1 << power, int(count))
        for power, count in enumerate(counts)
        if power >= int(powers.min())
    ]


def epochs(budget: int, tokens: int) -> Epochs:
    """Return how many times a budget of tokens passes over the corpus."""
    if budget <= 0:
        raise DataError(f"--tokens {budget}: a budget has at least one token")
    return Epochs(budget, budget / tokens if tokens else None)


def _id_counts(corpus: Corpus) -> NDArray[np.int64]:
    counts = np.zeros(0, np.int64)
    for some in token_pieces(bin_path(corpus.prefix), corpus.tokens.dtype):
        here = (
            np.bincount(some, minlength=len(counts))
            if int(some.min(initial=0)) >= 0
            else np.zeros(0, np.int64)
        )
        here[: len(counts)] += counts
        counts = here
    return counts


def _common_end(corpus: Corpus) -> int | None:
    """Return the id at the end of every document, or None if they differ (checked in the first thousand)."""
    marks = np.unique(corpus.marks[1:1001])
    last = marks[marks > 0] - 1
    last = last[corpus.lengths[last] > 0]
    ends = corpus.tokens[corpus.offsets[last] + corpus.lengths[last] - 1]
    return int(ends[0]) if len(ends) and (ends == ends[0]).all() else None


def _tokenizer(
    prefix: Path, given: Path | None, manifest: Manifest | None, samples: int, eod: str
) -> Tokenizer | None:
    if not samples:
        return None
    recorded = manifest and manifest.tokenizer
    if given is None:
        if not recorded or not Path(recorded.path).exists():
            return None
        given = Path(recorded.path)
    decoder = Tokenizer.load(given, eod or (manifest and manifest.eod_token) or "")
    if problem := other_tokenizer(prefix, decoder):
        raise DataError(*problem)
    return decoder


def _samples(corpus: Corpus, decoder: Tokenizer, count: int) -> Iterator[DocumentSample]:
    """Yield the beginnings of documents spread over the corpus."""
    numbers = np.unique(np.linspace(0, corpus.documents - 1, min(count, corpus.documents)).astype(int))
    for number in numbers.tolist():
        ids = corpus.document(number)
        beginning = ids[:SAMPLE_TOKENS].tolist()
        yield DocumentSample(number, len(ids), decoder.decode(beginning), tuple(beginning[:8]))
