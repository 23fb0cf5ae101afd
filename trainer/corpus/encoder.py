"""Encode documents into token ids: in C++ with a cache of words, which gives exactly the ids of `tokenizers`,
or with `tokenizers`.

    encoder = encoder_for(tokenizer, threads=2)
    ids, lengths = encoder.encode_many(texts)   # one array for all
    encoder.describe()                          # which encoder, and why

The C++ code supports one kind of tokenizer: byte-level BPE with GPT-2's word splitting, which is what
`data tokenizer train` makes. `Encoder.load` refuses every other kind and checks that the installed
`tokenizers` splits text in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from native.compiled.library import LibraryMissing
from native.text import bpe
from native.text.unicode_classes import CODE_POINTS, FRAMES, OTHER
from trainer.corpus.indexed import token_type
from trainer.corpus.tokenizer import Tokenizer, byte_characters
from trainer.errors import DataError
from trainer.json_types import JsonObject

Encoded = tuple[NDArray[Any], NDArray[np.int32]]
"""The ids of all documents, one after the other, and how many each has."""


class NotExact(Exception):
    """The C++ code might not return the ids of `tokenizers`; the message lists all reasons."""


class NotText(DataError):
    """A document cannot be written as UTF-8, for example half of a surrogate pair; `document` is its index
    in the call."""

    def __init__(self, document: int, why: str) -> None:
        super().__init__(f"document {document}: {why}")
        self.document = document


class Encoder:
    """Encode in C++. Calls from several threads run one after the other; other Python threads continue."""

    why = ""
    """Why the C++ code is not used: empty here, a reason in `LibraryEncoder`."""

    def __init__(self, inner: bpe.Bpe, eod: int) -> None:
        self._inner = inner
        self._eod = eod

    @classmethod
    def load(cls, tokenizer: Tokenizer, threads: int = 1) -> Encoder:
        """Return an encoder; raise NotExact if its ids could differ, LibraryMissing if nothing is compiled."""
        tables = _tables(tokenizer.definition())
        inner = bpe.Bpe(tables, token_type(tokenizer.vocab), threads)
        _compare(inner)
        return cls(inner, tokenizer.eod)

    def describe(self) -> str:
        count = self._inner.threads
        return f"C++, {count} {'thread' if count == 1 else 'threads'}"

    def encode_many(self, texts: Sequence[str], append_eod: bool = False) -> Encoded:
        """Encode texts; `append_eod` adds the end-of-document id after each non-empty document and counts
        it in the length."""
        pieces = [_utf8(i, text) for i, text in enumerate(texts)]
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        return self.encode_bytes(b"".join(pieces), starts, ends, append_eod)

    def encode_bytes(
        self, text: Any, starts: NDArray[np.int64], ends: NDArray[np.int64], append_eod: bool = False
    ) -> Encoded:
        """Encode the documents text[starts[i]:ends[i]] of a UTF-8 buffer; they are in order and do not
        overlap."""
        try:
            return self._inner.encode(text, starts, ends, self._eod if append_eod else None)
        except bpe.NotUtf8 as error:
            raise NotText(error.document, "not UTF-8") from None


class LibraryEncoder:
    """Encode with `tokenizers`, which supports every kind; `why` says why the C++ code is not used."""

    def __init__(self, tokenizer: Tokenizer, why: str) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_type(tokenizer.vocab)
        self.why = why

    def describe(self) -> str:
        return f"tokenizers {tokenizers.__version__} ({self.why})"

    def encode_many(self, texts: Sequence[str], append_eod: bool = False) -> Encoded:
        for i, text in enumerate(texts):
            _utf8(i, text)
        rows = self._tokenizer.encode_many(texts)
        if append_eod:
            rows = [row and [*row, self._tokenizer.eod] for row in rows]
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        ids = np.fromiter((number for row in rows for number in row), self._dtype, int(lengths.sum()))
        return ids, lengths

    def encode_bytes(
        self, text: Any, starts: NDArray[np.int64], ends: NDArray[np.int64], append_eod: bool = False
    ) -> Encoded:
        view = memoryview(text).cast("B")
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        return self.encode_many(
            [_text(i, bytes(view[start:end])) for i, (start, end) in enumerate(places)], append_eod
        )


def encoder_for(tokenizer: Tokenizer, threads: int = 1) -> Encoder | LibraryEncoder:
    """Return the C++ encoder if it is exact and compiled, else `tokenizers` with the reason in
    `describe()`."""
    try:
        return Encoder.load(tokenizer, threads)
    except (NotExact, LibraryMissing) as reason:
        return LibraryEncoder(tokenizer, str(reason))


def _utf8(document: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NotText(document, f"not text: {error}") from None


def _text(document: int, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise NotText(document, "not UTF-8") from None


def _tables(definition: JsonObject) -> bpe.Tables:
    """Return the tables for the C++ code; raise NotExact for another kind of tokenizer."""
    if faults := [*_faults(definition)]:
        raise NotExact("; ".join(faults))
    model = definition["model"]
    vocab: dict[str, int] = model["vocab"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merges = np.array([(vocab[a], vocab[b], vocab[a + b]) for a, b in pairs], np.uint32).reshape(-1, 3)
    return bpe.Tables(
        np.array([vocab[character] for character in byte_characters()], np.uint32),
        merges,
        [
            bpe.Added(token["content"].encode(), token["id"], bool(token["normalized"]))
            for token in definition["added_tokens"]
            if token["content"]
        ],
        bool(definition["pre_tokenizer"]["add_prefix_space"]),
    )


def _faults(definition: JsonObject) -> Iterable[str]:
    """Yield every part of a tokenizer.json that the C++ code does not handle as `tokenizers` does."""
    for key in ("normalizer", "truncation", "padding"):
        if definition.get(key) is not None:
            yield f"it has a {key}" if key == "normalizer" else f"it has {key}"
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    if pre_tokenizer.get("type") != "ByteLevel" or not pre_tokenizer.get("use_regex", True):
        yield f"it splits words by {pre_tokenizer.get('type', 'nothing')}, unlike GPT-2"
    if not _leaves_ids(definition.get("post_processor")):
        yield f"it has a {definition['post_processor']['type']} after the model"
    for token in definition["added_tokens"]:
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token[flag]]
        if flags:
            yield f"its added token {token['content']!r} is {' and '.join(flags)}"
    yield from _model_faults(definition["model"])


def _leaves_ids(after: JsonObject | None) -> bool:
    """Return whether the post-processor keeps the ids of the text; it may add special tokens, which are not
    requested here."""
    kind = after["type"] if after else "ByteLevel"
    if after and kind == "Sequence":
        return all(map(_leaves_ids, after["processors"]))
    if after and kind == "TemplateProcessing":
        return [piece["Sequence"]["id"] for piece in after["single"] if "Sequence" in piece] == ["A"]
    return kind in ("ByteLevel", "RobertaProcessing", "BertProcessing")


def _model_faults(model: JsonObject) -> Iterable[str]:
    if model.get("type", "BPE") != "BPE":
        yield f"its model is {model['type']}, not BPE"
        return
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            yield f"its model has {key}"
    vocab = model["vocab"]
    absent = sum(character not in vocab for character in byte_characters())
    if absent:
        yield f"{absent} of the 256 bytes are not in its vocabulary"
    if len(set(vocab.values())) < len(vocab):
        yield "two of its tokens have one id"
    if len(model["merges"]) > bpe.MOST_MERGES:
        yield f"it has {len(model['merges'])} merges"
    if (largest := max(vocab.values())) > bpe.LARGEST_ID:
        yield f"it has a token of id {largest}"


def _compare(inner: bpe.Bpe) -> None:
    """Raise NotExact if the installed `tokenizers` classifies characters differently from the C++ code.

    The two may follow different Unicode versions. A new version extends ranges of characters or starts new
    ones at multiples of 16, so a few thousand code points are enough; checking all would take seconds.
    """
    text = "".join(FRAMES[kind].format(chr(code)) for code, kind in _code_points_to_compare())
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    if not np.array_equal(inner.words(text.encode()), np.cumsum([len(word) for word, _ in theirs])):
        raise NotExact(f"tokenizers {tokenizers.__version__} follows another Unicode version")


def _code_points_to_compare() -> Iterable[tuple[int, int]]:
    """Yield code points at and next to the ends of ranges, and some between ranges, each with its class."""
    ranges = bpe.unicode_ranges().astype(np.int64)
    kinds = np.full(CODE_POINTS, OTHER, np.uint8)
    for first, end, kind in ranges:
        kinds[first:end] = kind
    near = (ranges[:, :2, None] + np.array([-1, 0])).ravel()
    strides = np.concatenate([np.arange(0, 0x20000, 16), np.arange(0x20000, CODE_POINTS, 256)])
    codes = np.unique(np.concatenate([near, strides[kinds[strides] == OTHER]]))
    codes = codes[(codes >= 0) & (codes < CODE_POINTS) & ((codes < 0xD800) | (codes >= 0xE000))]
    return zip(codes.tolist(), kinds[codes].tolist(), strict=True)
