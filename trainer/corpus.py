"""Text -> tokens -> Megatron's `.bin` and `.idx`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import DataError
from trainer.files import replace_file, sha256
from trainer.indexed import Corpus as Corpus
from trainer.indexed import Writer as Writer
from trainer.indexed import bin_path, idx_path
from trainer.indexed import open_corpus as open_corpus
from trainer.indexed import token_type as token_type

if TYPE_CHECKING:
    from trainer.tokenizer import Tokenizer

AT_ONCE = 256  # documents encoded together


def read_texts(paths: Sequence[Path], key: str = "text") -> Iterator[str]:
    """Documents of JSON-lines files (their `key`) and of text files (each file one document)."""
    for path in paths:
        if path.suffix in (".jsonl", ".json"):
            yield from _read_json_lines(path, key)
        else:
            try:
                yield path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: {_reason(error)}") from None


def _read_json_lines(path: Path, key: str) -> Iterator[str]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _document(line, key, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: {_reason(error)}") from None


def _document(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no text under {key!r} (there is: {keys})", "name the right one with --key")
    return str(record[key])


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else f"not UTF-8: {error}"


def build_corpus(
    texts: Iterable[str], tokenizer: Tokenizer, prefix: Path, append_eod: bool
) -> dict[str, Any]:
    """Encode documents into a pair at `prefix`; the answer has documents, tokens, bytes and entropy."""
    counts = np.zeros(tokenizer.vocab, np.int64)
    characters = empty = 0
    with Writer(prefix, token_type(tokenizer.vocab)) as writer:
        for some in _chunks(texts, AT_ONCE):
            characters += sum(len(text) for text in some)
            for ids in tokenizer.encode_many(some):
                if not ids:
                    empty += 1
                    continue
                if append_eod:
                    ids.append(tokenizer.eod)
                writer.add_document([ids])
                counts += np.bincount(ids, minlength=len(counts))
        if not writer.sequences:
            raise DataError("the input has no document with text in it", "check the files and --key")
    summary = {
        "prefix": str(prefix),
        "documents": writer.documents,
        "empty_documents": empty,
        "tokens": int(counts.sum()),
        "characters": characters,
        "bytes": bin_path(prefix).stat().st_size,
        "vocab": tokenizer.vocab,
        "eod": tokenizer.eod,
        "append_eod": append_eod,
        "unigram_entropy_nats": entropy(counts),
        "idx_sha256": sha256(idx_path(prefix)),
    }
    replace_file(prefix.with_name(prefix.name + ".info.json"), json.dumps(summary, indent=2).encode() + b"\n")
    return summary


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def entropy(counts: NDArray[np.int64]) -> float:
    """Nats a token when each is drawn by its frequency alone: the best without any context."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def describe(prefix: Path) -> dict[str, Any]:
    """What `data-info` shows of a pair."""
    corpus = open_corpus(prefix)
    counts = np.bincount(corpus.tokens) if len(corpus.tokens) else np.zeros(0, np.int64)
    return {
        "prefix": str(prefix),
        "documents": corpus.documents,
        "sequences": len(corpus.lengths),
        "tokens": len(corpus.tokens),
        "token_type": corpus.tokens.dtype.name,
        "bytes": bin_path(prefix).stat().st_size,
        "largest_id": len(counts) - 1,
        "shortest": int(corpus.lengths.min(initial=0) if not len(corpus.lengths) else corpus.lengths.min()),
        "longest": int(corpus.lengths.max(initial=0)),
        "unigram_entropy_nats": entropy(counts) if len(counts) else 0.0,
        "idx_sha256": corpus.identity(),
    }
