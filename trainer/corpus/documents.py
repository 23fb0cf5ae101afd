"""Turn pieces of an input into documents, each a text or a list of ids; report invalid records with their
place.

`sentences` splits a text; only the white space between sentences is lost. `texts_of` yields the texts that
train a tokenizer, and raises an error at the first invalid record.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.corpus.inputs import (
    Piece,
    Reader,
    find_inputs,
    parquet_file,
)
from trainer.errors import DataError
from trainer.files import texts

KEYED = ("jsonl", "parquet")
KEYS_SHOWN = 8
# Rows of a Parquet file that are in memory together.
ROWS = 1024
DOC = re.compile(rb"<doc\b[^>]*>\n?(.*?)\n?</doc>", re.DOTALL)
PAGE = re.compile(rb"<page>.*?</page>", re.DOTALL)
PARAGRAPHS = re.compile(r"(?:\r?\n[ \t]*){2,}")


@dataclass(frozen=True)
class Bad:
    """A line (page, row) without a usable document, and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class NotADocument(Exception):
    """A record cannot be used; the message says why. `documents` turns it into a `Bad` with the place."""


def documents(piece: Piece, key: str, each: str, vocab: int) -> Iterator[str | list[int] | Bad]:
    """Yield every document of a piece in order. An empty document counts too."""
    if piece.bad:
        yield Bad(f"{piece.name}:{piece.line}", piece.bad)
        return
    for where, record in RECORDS[piece.kind](piece, key if piece.kind in KEYED else each):
        try:
            if piece.kind != "jsonl":
                yield _checked(record, vocab)
            else:
                # A str is valid Unicode; a line of bytes must be checked.
                yield record if isinstance(record, str) else _checked(_value(record, key), vocab)
        except NotADocument as error:
            yield Bad(f"{piece.name}:{where}", str(error))


def _checked(value: Any, vocab: int) -> str | list[int]:
    if isinstance(value, NotADocument):
        raise value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotADocument(f"not UTF-8 (at its byte {error.start})") from None
    if isinstance(value, str):
        return _whole(value)
    if not _are_ids(value):
        raise NotADocument(f"not a text but a {type(value).__name__}")
    wrong = next((number for number in value if not 0 <= number < vocab), None)
    if wrong is not None:
        raise NotADocument(f"token id {wrong} is not in the vocabulary of {vocab}")
    return list(value)


def _whole(text: str) -> str:
    """Return the text; raise NotADocument for half of a surrogate pair, which JSON can contain and no
    tokenizer accepts."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotADocument(
            f"half of a surrogate pair, \\u{ord(text[error.start]):04x}, without the other half"
        ) from None
    return text


# -- JSON lines ---------------------------------------------------------------------------------------------


def _lines(piece: Piece, key: str) -> Iterator[tuple[str, str | bytes]]:
    """Yield the text of each line, or the raw line if it still has to be parsed in full."""
    data = piece.data
    if piece.line == 1:
        data = data.removeprefix(b"\xef\xbb\xbf")
    for number, found in texts(data, key):
        yield str(piece.line + number), found


def _value(line: bytes, key: str) -> Any:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise NotADocument(f"not UTF-8 (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise NotADocument(f"not a line of JSON: {error}") from None
    value = record.get(key) if isinstance(record, dict) else None
    if isinstance(value, str) or _are_ids(value):
        return value
    raise NotADocument(f"no text under {key!r} ({_there_is(record, key)})")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _there_is(record: Any, key: str) -> str:
    if not isinstance(record, dict):
        return f"the line is a {type(record).__name__}"
    if key in record:
        return f"it is a {type(record[key]).__name__}"
    names = list(record)
    return "there is: " + (
        ", ".join(names[:KEYS_SHOWN]) + (", ..." if len(names) > KEYS_SHOWN else "") or "nothing"
    )


# -- the other kinds ----------------------------------------------------------------------------------------


def _text(piece: Piece, each: str) -> Iterator[tuple[str, Any]]:
    data = piece.data.removeprefix(b"\xef\xbb\xbf") if piece.line == 1 else piece.data
    if each == "file":
        yield str(piece.line), data
    elif each == "line":
        for number, line in enumerate(data.split(b"\n"), piece.line):
            if line and not line.isspace():
                yield str(number), line.removesuffix(b"\r")
    else:
        yield from _paragraphs(data, piece.line)


def _paragraphs(data: bytes, line: int) -> Iterator[tuple[str, Any]]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        # It is reported as a bad record.
        yield str(line), data
        return
    for paragraph in PARAGRAPHS.split(text):
        if paragraph.strip():
            yield str(line), paragraph.strip("\r\n")


def _wikiextracted(piece: Piece, each: str) -> Iterator[tuple[str, Any]]:
    """Yield the documents of WikiExtractor files: the text between `<doc id=... title=...>` and `</doc>`."""
    for line, found in _marked(piece, DOC, b"<doc "):
        text = found if isinstance(found, NotADocument) else found[1].decode("utf-8", "surrogateescape")
        yield (
            line,
            text
            if isinstance(text, NotADocument)
            else html.unescape(text).encode("utf-8", "surrogateescape"),
        )


def _pages(piece: Piece, each: str) -> Iterator[tuple[str, Any]]:
    """Yield the articles of a MediaWiki dump; skip redirects and pages outside the article namespace."""
    # Importing the patterns takes 25 ms.
    from trainer.corpus.wikitext import article

    for line, found in _marked(piece, PAGE, b"<page>"):
        if isinstance(found, NotADocument):
            yield line, found
            continue
        try:
            text = article(found[0])
        except UnicodeDecodeError:
            yield line, NotADocument("not UTF-8")
            continue
        if text is not None:
            yield line, text


def _marked(
    piece: Piece, pattern: re.Pattern[bytes], opening: bytes
) -> Iterator[tuple[str, re.Match[bytes] | NotADocument]]:
    """Yield each match of `pattern` with its line; if an `opening` follows the last one, the file was truncated."""
    line, at = piece.line, 0
    for found in pattern.finditer(piece.data):
        line += piece.data.count(b"\n", at, found.start())
        yield str(line), found
        line, at = line + found[0].count(b"\n"), found.end()
    left = piece.data.find(opening, at)
    if left >= 0:
        line += piece.data.count(b"\n", at, left)
        yield str(line), NotADocument(f"{opening.decode().strip()} is not closed: the file was truncated")


def _ids(piece: Piece, each: str) -> Iterator[tuple[str, Any]]:
    tokens = np.frombuffer(piece.data, "<i4")
    ends = np.cumsum(piece.lengths)
    for number, (end, length) in enumerate(zip(ends, piece.lengths, strict=True), piece.line):
        yield str(number), tokens[end - length : end].tolist()


def _rows(piece: Piece, key: str) -> Iterator[tuple[str, Any]]:
    """Yield one column of a row group, a few rows at a time."""
    file = parquet_file(piece.name)
    columns = file.schema_arrow.names
    if key not in columns:
        raise DataError(
            f"{piece.name}: no column {key!r}; there is: {', '.join(columns)}", "name one with --key"
        )
    number = 0
    for batch in file.iter_batches(ROWS, row_groups=[piece.row_group], columns=[key]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield f"row group {piece.row_group}, row {number}", value


RECORDS: dict[str, Callable[..., Iterator[tuple[str, Any]]]] = {
    "jsonl": _lines,
    "text": _text,
    "wikiextractor": _wikiextracted,
    "mediawiki": _pages,
    "lazy": _ids,
    "parquet": _rows,
}


# The end of a sentence: a full stop or similar, closing quotes and brackets, then a gap. Chinese and
# Japanese need no gap.
END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）》]*\s*|\n\s*\n\s*")
LAST_WORD = re.compile(r"(?<![\w.])((?:[^\W\d_]\.)*[^\W\d_]*)\.[\"'”’»)\]]*\s*$")
BEGINS_LOW = re.compile(r"[^\w]*[a-zà-öø-ÿа-яα-ω]")
ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "rev", "hon", "st", "sr", "jr", "gen", "col", "capt", "lt", "sgt", "maj",
    "gov", "sen", "rep", "pres", "vs", "etc", "e.g", "i.e", "cf", "al", "fig", "figs", "eq", "no", "nos", "vol",
    "vols", "pp", "p", "ch", "sec", "ed", "eds", "trans", "approx", "ca", "c", "inc", "ltd", "co", "corp", "mt",
    "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "dept", "univ", "est",
    "viz", "ibid", "op", "cit", "z.b", "d.h", "u.a", "bzw", "nr", "m", "mme", "mlle", "sra", "dra",
}  # fmt: skip


def sentences(text: str) -> list[str]:
    """Return the sentences of a text without the white space between them."""
    found, begin = [], 0
    for end in END.finditer(text):
        if _goes_on(text, begin, end):
            continue
        found.append(text[begin : end.end()].strip())
        begin = end.end()
    found.append(text[begin:].strip())
    return [sentence for sentence in found if sentence]


def _goes_on(text: str, begin: int, end: re.Match[str]) -> bool:
    """Return whether the sentence continues: the full stop ends an abbreviation or an initial, or a
    lower-case letter follows."""
    mark = end[0]
    if "\n\n" in mark.replace("\r", "") or mark[0] in "。！？":
        return False
    if BEGINS_LOW.match(text, end.end(), end.end() + 3):
        return True
    word = LAST_WORD.search(text, max(begin, end.start() - 24), end.end()) if mark[0] == "." else None
    if word is None:
        return False
    short = word[1].lower()
    return (
        short in ABBREVIATIONS
        or (len(short) == 1 and word[1].isupper())
        or bool(re.fullmatch(r"(?:\w\.)+\w", short))
    )


# No id can be out of range here, because lists of ids are refused.
LARGEST = 2**31


def some_text(texts: Iterator[str]) -> Iterator[str]:
    """Yield all texts; after them, raise a DataError if none of them has a character."""
    is_empty = True
    for text in texts:
        is_empty = is_empty and not text.strip()
        yield text
    if is_empty:
        raise DataError("the input has no document with text in it", "check the files and --key")


def texts_of(inputs: Sequence[str], key: str = "text", kind: str = "", each: str = "file") -> Iterator[str]:
    """Yield every text in order; raise DataError for a list of token ids."""
    return _texts(Reader(find_inputs(inputs, kind), each), key, each)


def _texts(reader: Reader, key: str, each: str) -> Iterator[str]:
    for part in reader.parts():
        for piece in part.pieces:
            for document in documents(piece, key, each, LARGEST):
                if isinstance(document, Bad):
                    raise DataError(str(document), "fix the line, or name the right key with --key")
                if not isinstance(document, str):
                    raise DataError(
                        f"{piece.name}: holds token ids, not text", "name a key that holds text with --key"
                    )
                yield document
