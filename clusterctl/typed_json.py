"""Convert between JSON and frozen dataclasses, so that a value read from a file has the types that it declares."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class BadValue(ValueError):
    """A value is not of the declared type; the message names its key."""


def parse(text: bytes | str) -> Any:
    """Return the value of a JSON text; raise BadValue for every text that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadValue("nested too deeply") from None
    except ValueError as error:
        raise BadValue(f"not JSON: {error}") from None


def decode(kind: type[T], value: Any, key: str = "") -> T:
    """Return `value` as a `kind`; raise BadValue with the key of the first wrong part.

    Unknown keys are ignored, since a newer version may write more of them. A missing key takes the field's default.
    """
    return typing.cast(T, _decode(kind, value, key))


def _decode(kind: Any, value: Any, key: str) -> Any:
    # Most values are texts and integers: this makes reading a record twice as fast.
    if kind is Any or (type(value) is kind and kind in (str, int)):
        return value
    if is_dataclass(kind):
        return _decode_dataclass(kind, value, key)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(kind, value, key)
    if origin is tuple:
        items = _expect(value, list, key)
        inner = typing.get_args(kind)[0]
        return tuple(_decode(inner, item, f"{key}[{index}]") for index, item in enumerate(items))
    if origin in (dict, Mapping):
        name_kind, inner = typing.get_args(kind)
        return {
            _decode_name(name_kind, name, key): _decode(inner, item, f"{key}.{name}")
            for name, item in _expect(value, dict, key).items()
        }
    return _decode_scalar(kind, value, key)


def _decode_optional(kind: Any, value: Any, key: str) -> Any:
    if value is None:
        return None
    return _decode(next(option for option in typing.get_args(kind) if option is not type(None)), value, key)


def _decode_name(kind: Any, name: str, key: str) -> Any:
    if kind is int:
        if not name.isascii() or not name.isdecimal() or len(name) > 9:
            raise BadValue(f"{key}: {name[:40]!r} is not a number")
        return int(name)
    return name


def _decode_scalar(kind: Any, value: Any, key: str) -> Any:
    if kind is float:
        number = float(_expect(value, (int, float), key)) if _is_small(value) else math.inf
        if not math.isfinite(number):
            raise BadValue(f"{key}: {value!r:.40} is not a finite number")
        return number
    if kind is Path:
        return Path(_expect(value, str, key))
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise BadValue(f"{key}: {value!r:.40} is not a {kind.__name__}") from None
    return _expect(value, kind, key)


def _is_small(value: Any) -> bool:
    """Return whether a float can hold the number: JSON has integers of any length."""
    return not isinstance(value, int) or value.bit_length() < 1000


def _expect(value: Any, kind: Any, key: str) -> Any:
    """Return `value` if it is of `kind`; a bool is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = "a number" if isinstance(kind, tuple) else f"of type {kind.__name__}"
        raise BadValue(f"{key or 'the value'}: {value!r:.40} is not {name}")
    return value


@cache
def _hints(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return each field's type, and whether it has a default."""
    hints = typing.get_type_hints(kind)
    return {
        member.name: (
            hints[member.name],
            member.default is not MISSING or member.default_factory is not MISSING,
        )
        for member in fields(kind)
        if member.init
    }


def _decode_dataclass(kind: Any, value: Any, key: str) -> Any:
    found, prefix = _expect(value, dict, key), f"{key}." if key else ""
    given = {}
    for name, (hint, has_default) in _hints(kind).items():
        if name in found:
            given[name] = _decode(hint, found[name], prefix + name)
        elif not has_default:
            raise BadValue(f"{prefix}{name} is missing")
    return kind(**given)


def encode(value: Any, sparse: bool = False) -> Any:
    """Return `value` as plain dicts, lists and scalars. `sparse` leaves out fields of dataclasses that are empty."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {member.name: getattr(value, member.name) for member in fields(value) if member.repr}
        return {
            name: encode(item, sparse) for name, item in found.items() if not sparse or not _is_empty(item)
        }
    if isinstance(value, dict):
        return {str(name): encode(item, sparse) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item, sparse) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _is_empty(item: Any) -> bool:
    return item is None or item is False or item == "" or (isinstance(item, (tuple, dict)) and not item)
