"""Extract the text under one key from lines of JSON, in compiled code that creates no Python objects for the rest."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from native.compiled.arguments import POINTER, SIZE, TEXT, function, structure
from native.compiled.library import why_not

__all__ = ["Lines", "read", "why_not"]


@dataclass(frozen=True)
class Lines:
    """The lines that are not blank, in order.

    If `plain`, text[starts:ends] is the text under the key, in UTF-8. The caller reads every other line,
    data[starts:ends], with Python's JSON reader, which accepts more forms and reports errors.
    """

    text: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """The line numbers, from 0."""
    characters: NDArray[np.int64]
    """The number of characters of each plain text."""
    plain: NDArray[np.bool_]


class _Reading(ctypes.Structure):
    """The layout of `struct Reading` in json_lines.cpp."""

    _fields_ = structure(
        (TEXT, "data"),
        (SIZE, "size"),
        (TEXT, "key"),
        (SIZE, "key_size"),
        (POINTER, "text starts ends numbers characters plain"),
    )


def read(data: bytes, key: str) -> Lines:
    """Return the texts under `key` in `data`, which consists of whole lines."""
    most = data.count(b"\n") + 1
    starts, ends, numbers, characters = (np.empty(most, np.int64) for _ in range(4))
    text, plain = np.empty(len(data) + 8, np.uint8), np.empty(most, np.bool_)
    # A key with a lone surrogate matches no line, because lines are UTF-8.
    name = key.encode("utf-8", "surrogatepass")
    written = (array.ctypes.data for array in (text, starts, ends, numbers, characters, plain))
    reading = _Reading(data, len(data), name, len(name), *written)
    n = function("native_json_lines", SIZE, POINTER)(ctypes.byref(reading))
    return Lines(text, starts[:n], ends[:n], numbers[:n], characters[:n], plain[:n])
