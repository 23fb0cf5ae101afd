"""Encode UTF-8 text to token ids by byte-level BPE in C++.

It works on tables in memory; the caller reads tokenizer files.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native.compiled.arguments import INT, POINTER, SIZE, TEXT, function, structure
from native.compiled.library import why_not

__all__ = ["Added", "Bpe", "NotUtf8", "Tables", "check_places", "unicode_ranges", "why_not"]

# These two limits exist because a pair of ids and its rank are packed into one 64-bit number.
MOST_MERGES = (1 << 23) - 1
LARGEST_ID = (1 << 20) - 2
# In bytes: a document's ids are counted in 32 bits, and each byte may become an id.
LARGEST_DOCUMENT = (1 << 31) - 2
MOST_THREADS = 256
# The same value as SLACK in bpe.cpp.
_SLACK = 16


class NotUtf8(ValueError):
    """Raised for text that is not UTF-8; `document` is the number of the first such document of the call."""

    def __init__(self, document: int) -> None:
        super().__init__(f"document {document} is not UTF-8")
        self.document = document


@dataclass(frozen=True)
class Added:
    """An added token, found in the text before the text is divided into words.

    `late` tokens are searched for in a second pass, in the text between the other added tokens.
    """

    text: bytes
    id: int
    late: bool


@dataclass(frozen=True)
class Tables:
    """The tables of one tokenizer: the id of every byte, and (left, right, merged) ids of every merge by rank."""

    byte_ids: NDArray[np.uint32]  # (256,)
    merges: NDArray[np.uint32]  # (merges, 3)
    added: Sequence[Added]
    prefix_space: bool


class _Spec(ctypes.Structure):
    """The layout of `struct Spec` in bpe.cpp."""

    _fields_ = structure(
        (POINTER, "byte_ids merges"),
        (TEXT, "added_text"),
        (POINTER, "added_ends added_ids added_passes"),
        (SIZE, "merge_count added_count"),
        (INT, "prefix_space wide threads"),
    )


class _Job(ctypes.Structure):
    """The layout of `struct Job` in bpe.cpp."""

    _fields_ = structure(
        (POINTER, "text starts ends"),
        (SIZE, "documents readable"),
        (POINTER, "ids lengths"),
        (SIZE, "eod"),
        (INT, "threads"),
    )


class Bpe:
    """A tokenizer's model with its caches, which have a fixed size of 4 MiB per thread. `dtype` is uint16 or int32."""

    def __init__(self, tables: Tables, dtype: Any, threads: int = 1) -> None:
        self.dtype = np.dtype(dtype)
        self.threads = min(max(1, threads), MOST_THREADS)
        self._wide = self.dtype.itemsize == 4
        # The largest number of ids per byte.
        self._room = 2 if tables.prefix_space else 1
        self._lock = threading.Lock()
        self._handle = self._made(tables)

    def _made(self, tables: Tables) -> ctypes.c_void_p:
        if len(tables.merges) > MOST_MERGES:
            raise ValueError(f"{len(tables.merges)} merges; at most {MOST_MERGES}")
        byte_ids = np.ascontiguousarray(tables.byte_ids, np.uint32)
        merges = np.ascontiguousarray(tables.merges, np.uint32).reshape(-1, 3)
        if max(byte_ids.max(), merges.max(initial=0)) > LARGEST_ID:
            raise ValueError(f"a token with id {merges.max()}; at most {LARGEST_ID}")
        added = sorted(tables.added, key=lambda token: -len(token.text))
        ends = np.cumsum([len(token.text) for token in added], dtype=np.int64)
        ids = np.array([token.id for token in added], np.uint32)
        passes = np.array([token.late for token in added], np.uint8)
        text, more = (
            b"".join(token.text for token in added),
            (each.ctypes.data for each in (ends, ids, passes)),
        )
        pointers = (byte_ids.ctypes.data, merges.ctypes.data, text, *more)
        sizes = (len(merges), len(added), tables.prefix_space, self._wide, self.threads)
        spec = _Spec(*pointers, *sizes)
        handle = ctypes.c_void_p(function("native_bpe_new", POINTER, POINTER)(ctypes.byref(spec)))
        if not handle:
            raise MemoryError("no memory for the tables of a tokenizer")
        weakref.finalize(self, function("native_bpe_free", None, POINTER), handle)
        return handle

    def encode(
        self, text: Any, starts: NDArray[np.int64], ends: NDArray[np.int64], eod: int | None = None
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the ids of all documents text[starts[i]:ends[i]] in one array, and the number of ids of each document.

        text: any object with a buffer of bytes; starts and ends ascend, and documents do not overlap.
        eod: this id is appended to every document that has ids, and counted in its length.
        """
        view = np.frombuffer(text, np.uint8)
        starts = np.ascontiguousarray(starts, np.int64)
        ends = np.ascontiguousarray(ends, np.int64)
        check_places(starts, ends, len(view))
        documents = len(starts)
        size = int(ends[-1] - starts[0]) if documents else 0
        ids = np.empty(self._room * size + documents + self.threads * _SLACK, self.dtype)
        lengths = np.zeros(documents, np.int32)
        places = (view.ctypes.data, starts.ctypes.data, ends.ctypes.data, documents, len(view))
        written = (ids.ctypes.data, lengths.ctypes.data)
        job = _Job(*places, *written, -1 if eod is None else eod, self.threads)
        # The caches belong to the model, so only one call may run at a time.
        with self._lock:
            total: int = function("native_bpe_encode", SIZE, POINTER, POINTER)(
                self._handle, ctypes.byref(job)
            )
        if total == -1:
            raise MemoryError("no memory to encode a long word")
        if total < 0:
            raise NotUtf8(-2 - total)
        return ids[:total], lengths

    def words(self, text: bytes) -> NDArray[np.int64]:
        """Return the byte offsets at which the words of `text` end; added tokens are not recognised."""
        ends = np.empty(len(text), np.int64)
        find = function("native_bpe_words", SIZE, POINTER, TEXT, SIZE, POINTER)
        count = find(self._handle, text, len(text), ends.ctypes.data)
        return ends[:count]


def check_places(starts: NDArray[np.int64], ends: NDArray[np.int64], size: int) -> None:
    """Raise ValueError if the C++ code would read or write outside its memory for these documents."""
    if starts.ndim != 1 or starts.shape != ends.shape:
        raise ValueError(f"starts and ends are {starts.shape} and {ends.shape}; each (documents,) is needed")
    if not len(starts):
        return
    if starts[0] < 0 or ends[-1] > size or (ends < starts).any() or (starts[1:] < ends[:-1]).any():
        raise ValueError(f"documents must ascend without overlap within the {size} bytes of the text")
    longest = int((ends - starts).argmax())
    if ends[longest] - starts[longest] > LARGEST_DOCUMENT:
        raise ValueError(
            f"document {longest} has {ends[longest] - starts[longest]} bytes; at most {LARGEST_DOCUMENT}"
        )


def unicode_ranges() -> NDArray[np.uint32]:
    """Return an array (ranges, 3): first code point, end (exclusive) and kind of each range in the table."""
    address = ctypes.POINTER(ctypes.c_uint32)()
    count = function("native_bpe_ranges", SIZE, POINTER)(ctypes.byref(address))
    found: NDArray[np.uint32] = np.ctypeslib.as_array(address, (count, 3)).copy()
    return found
