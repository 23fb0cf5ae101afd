"""Convert between JSON and frozen dataclasses, so that a value read from a file has the types that it declares."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
# Types whose values are used unchanged.
PLAIN = (str, int, bool)


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
    wanted: Any = kind
    return typing.cast(T, _decoder(wanted)(value, key))


Decoder = Callable[[Any, str], Any]
"""Takes a value and its key, for messages, and returns the value as the declared type."""


@cache
def _decoder(kind: Any) -> Decoder:
    """Return the decoder of a type. Each type is examined once: a list of runs has thousands of values."""
    origin = typing.get_origin(kind)
    if kind in (Any, object):
        return _anything
    if is_dataclass(kind):
        return _dataclass_decoder(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional_decoder(kind)
    if origin is tuple:
        return _tuple_decoder(kind)
    if origin in (dict, Mapping):
        return _dict_decoder(kind)
    return partial(_decode_scalar, kind)


def _anything(value: Any, _key: str) -> Any:
    return value


def _tuple_decoder(kind: Any) -> Decoder:
    plain, decode_item = typing.get_args(kind)[0], _decoder(typing.get_args(kind)[0])

    def decode_tuple(value: Any, key: str) -> Any:
        items = _expect(value, list, key)
        if plain in PLAIN and all(type(item) is plain for item in items):
            return tuple(items)
        return tuple(decode_item(item, f"{key}[{index}]") for index, item in enumerate(items))

    return decode_tuple


def _dict_decoder(kind: Any) -> Decoder:
    name_kind, inner = typing.get_args(kind)
    decode_item = _decoder(inner)

    def decode_dict(value: Any, key: str) -> Any:
        return {
            _decode_name(name_kind, name, key): decode_item(item, f"{key}.{name}")
            for name, item in _expect(value, dict, key).items()
        }

    return decode_dict


def _optional_decoder(kind: Any) -> Decoder:
    decode_value = _decoder(next(option for option in typing.get_args(kind) if option is not type(None)))

    def decode_optional(value: Any, key: str) -> Any:
        return None if value is None else decode_value(value, key)

    return decode_optional


def _decode_name(kind: Any, name: str, key: str) -> Any:
    if kind is int:
        if not name.isascii() or not name.isdecimal() or len(name) > 9:
            raise BadValue(f"{key}: {name[:40]!r} is not a number")
        return int(name)
    return name


def _decode_scalar(kind: Any, value: Any, key: str) -> Any:
    if type(value) is kind and kind in PLAIN:
        return value
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


def _dataclass_decoder(kind: Any) -> Decoder:
    def decode_dataclass(value: Any, key: str) -> Any:
        found = _expect(value, dict, key)
        given = {}
        for name, hint, decode_value, has_default in _members(kind):
            if name in found:
                item = found[name]
                # Most values are strings, numbers and booleans, which need no key.
                if type(item) is hint and hint in PLAIN:
                    given[name] = item
                else:
                    given[name] = decode_value(item, f"{key}.{name}" if key else name)
            elif not has_default:
                raise BadValue(f"{key}.{name} is missing" if key else f"{name} is missing")
        return kind(**given)

    return decode_dataclass


@cache
def _members(kind: type) -> list[tuple[str, Any, Decoder, bool]]:
    """Return each field's name and type, what reads it, and whether it has a default."""
    hints = typing.get_type_hints(kind)
    return [
        (
            member.name,
            hints[member.name],
            _decoder(hints[member.name]),
            member.default is not MISSING or member.default_factory is not MISSING,
        )
        for member in fields(kind)
        if member.init
    ]


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
