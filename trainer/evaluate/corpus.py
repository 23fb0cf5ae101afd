"""Perplexity of a corpus: of texts, or of the tokens of .bin/.idx files, whole or one part of the training's split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterctl.wire.results import Figure
from trainer.corpus.indexed import idx_path, open_corpus
from trainer.errors import DataError, InputError
from trainer.evaluate.request import Example, Score
from trainer.evaluate.rows import read_records, read_text
from trainer.evaluate.statistics import ratio_perplexity
from trainer.evaluate.task import Inputs, sums
from trainer.evaluate.text import Reader
from trainer.splits import SPLITS, split_bounds

CONVENTIONS = ("documents", "stream")
EXAMPLE = '{"text": "one document"}'


class Perplexity:
    """Documents scored one by one, each after an end-of-document token (`documents`), or as one stream (`stream`).

    A stream is what training reads: documents follow each other, and windows start anywhere in a document.
    """

    def __init__(self, inputs: Inputs) -> None:
        prefix = prefix_of(inputs.data)
        conventions = CONVENTIONS[::-1] if prefix else CONVENTIONS
        self.convention = inputs.pick("ppl", conventions)
        documents = _indexed(prefix, inputs) if prefix else _texts(inputs)
        documents = [ids for ids in documents[: inputs.limit or None] if len(ids)]
        if sum(map(len, documents)) < 2:
            raise DataError(f"{inputs.data}: contains fewer than two tokens to score")
        self.examples = self._examples(documents, inputs.reader)
        self.tokens = [float(sum(len(request.target) for request in own.requests)) for own in self.examples]

    def _examples(self, documents: Sequence[Sequence[int]], reader: Reader) -> list[Example]:
        if self.convention == "documents":
            return [reader.rolling(ids, reader.tokenizer.eod) for ids in documents]
        stream = [token for ids in documents for token in ids]
        return [Example((request,)) for request in reader.overlapping(stream, reader.window)]

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
        totals = sums(scores)
        loss = -sum(totals) / sum(self.tokens)
        return {"loss": Figure(loss), "perplexity": ratio_perplexity(totals, self.tokens)}


def prefix_of(data: Path) -> Path | None:
    """Return the prefix of .bin/.idx files if `data` is the prefix or one of the files; None for other files."""
    prefix = data.with_suffix("") if data.suffix in (".bin", ".idx") else data
    return prefix if idx_path(prefix).is_file() else None


def _indexed(prefix: Path, inputs: Inputs) -> list[Sequence[int]]:
    corpus = open_corpus(prefix)
    first, last = 0, corpus.documents
    if inputs.split != "all":
        if inputs.split not in SPLITS or not inputs.fractions:
            raise InputError(
                f"--split is {inputs.split!r}", "use train, valid, test or all, for a run's own corpus"
            )
        first, last = split_bounds(inputs.fractions, corpus.documents)[SPLITS.index(inputs.split)]
    if first == last:
        raise DataError(f"{prefix}: its part {inputs.split!r} contains no documents", "use --split all")
    return [corpus.document(number).tolist() for number in range(first, last)]


def _texts(inputs: Inputs) -> list[Sequence[int]]:
    if inputs.split != "all":
        raise InputError("--split needs a corpus in .bin/.idx form", "remove --split")
    if inputs.data.suffix in (".jsonl", ".json"):
        records = read_records(inputs.data, {"text": str}, EXAMPLE)
        texts = [str(record.value["text"]) for record in records]
    else:
        texts = [read_text(inputs.data)]
    return [*inputs.reader.tokenizer.encode_many(texts)]
