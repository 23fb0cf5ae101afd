"""JSON, NamedTuple and SHA-256 without the modules that are slow to import.

JSON comes from the C half of Python's json module: the whole module imports regular expressions and enum, 8 ms at every
start of an agent. NamedTuple is that of typing, whose import takes 10 ms.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

# Importing typing takes 10 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

SPACE = " \t\n\r"


class _Reading:
    """The options of the scanner, as json's own decoder sets them."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float, parse_int = float, int
    parse_constant = {name: float(name) for name in ("NaN", "Infinity", "-Infinity")}.__getitem__


def _no_json(value: object) -> object:
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _by_c() -> "tuple[Callable[[str], Any], Callable[[object], str]]":
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    scan = make_scanner(_Reading)  # type: ignore[arg-type]
    encode = make_encoder(None, _no_json, encode_basestring_ascii, None, ":", ",", False, False, True)

    def loads(text: str) -> Any:
        text = text.strip(SPACE)
        try:
            value, end = scan(text, 0)
        except (StopIteration, SystemError):
            # Without the module json, the scanner lacks the class of its error and returns nothing at all.
            raise ValueError("not JSON") from None
        if end != len(text):
            raise ValueError("text follows the JSON value")
        return value

    return loads, lambda value: "".join(encode(value, 0))


def _by_json() -> "tuple[Callable[[str], Any], Callable[[object], str]]":
    import json

    return json.loads, json.JSONEncoder(separators=(",", ":")).encode


def _chosen() -> "tuple[Callable[[str], Any], Callable[[object], str]]":
    try:
        loads, dumps = _by_c()
        if loads(dumps({"a": [1, "ä"]})) == {"a": [1, "ä"]}:
            return loads, dumps
    except (ImportError, AttributeError, TypeError):
        # This Python organises its json module in another way.
        pass
    return _by_json()


_loads, dumps = _chosen()


def loads(data: "bytes | str") -> "Any":
    """Return the value of a JSON text; raise ValueError for other texts, RecursionError if it is nested too deeply."""
    return _loads(data if isinstance(data, str) else data.decode("utf-8", "surrogatepass"))


def sha256() -> "Any":
    """Return a hash for small files: Python's own, because the one of hashlib loads OpenSSL, 3 ms of CPU."""
    # Named _sha2 since Python 3.12.
    for name in ("_sha256", "_sha2"):
        try:
            return __import__(name).sha256()
        except ImportError:
            continue
    import hashlib

    return hashlib.sha256()


TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from collections import namedtuple

    class _Made(type):
        """Makes of each class below NamedTuple a tuple with its fields' names, defaults and methods."""

        def __new__(cls, name, bases, space):
            if not bases:
                return super().__new__(cls, name, bases, space)
            fields = list(space.get("__annotations__", ()))
            defaults = [space.pop(field) for field in fields if field in space]
            plain = namedtuple(name, fields, defaults=defaults, module=space["__module__"])
            return type(name, (plain,), {"__slots__": (), **space})

    class NamedTuple(metaclass=_Made):
        """A tuple whose parts have names; defaults stand at the end."""
