"""Describe compiled functions for ctypes: the fields of their structures, and the types of their arguments."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from native.compiled.library import load

POINTER, TEXT, SIZE, INT, FLOAT = (
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_float,
)


def structure(*groups: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """Return the `_fields_` of a ctypes.Structure; each group is a type and the names of its fields, in order."""
    return tuple((name, kind) for kind, names in groups for name in names.split())


@functools.cache
def function(name: str, result: Any, *types: Any) -> Any:
    """Return the compiled function `name`; its result (None: it has none) and its arguments have these types."""
    found = load().functions[name]
    found.restype, found.argtypes = result, types
    return found
