"""Parse JSON strictly: what Python's parser silently accepts is a fault with its place.

Python keeps the last of two equal keys, accepts NaN, half of a surrogate pair and 1e999, and raises other errors for
deep nesting, a 5,000-digit number or bad UTF-8. Programs read a rank table with any of these differently.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# A table of 10,000 servers with 8 devices each has 15 MB.
MAX_BYTES = 64 << 20
# The deepest form (version 2.0) has 7 levels.
MAX_DEPTH = 32
MAX_DIGITS = 20
MAX_FAULTS = 1000

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonFault:
    """One fault of a JSON text; `kind` is a stable word, `pointer` is empty if the place is unknown."""

    kind: str
    pointer: str
    what: str
    remedy: str

    @property
    def fatal(self) -> bool:
        """Return whether the text has no value because of this fault."""
        return self.kind in ("size", "encoding", "depth", "syntax")


@dataclass(frozen=True)
class _Odd:
    """Stands for a number that JSON does not allow, such as NaN or 1e999."""

    text: str


class _Repeated(dict[str, Any]):
    """An object with repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def pointer(*parts: object) -> str:
    """Return a JSON pointer (RFC 6901) of these steps."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def read_json(raw: bytes) -> tuple[Any, list[JsonFault]]:
    """Parse JSON strictly; return (value or None, all faults)."""
    faults: list[JsonFault] = []
    if len(raw) > MAX_BYTES:
        problem = f"larger than {MAX_BYTES >> 20} MB"
        return None, [JsonFault("size", "", problem, "is this the right file?")]
    if raw.startswith(BOM):
        raw = raw[len(BOM) :]
        faults.append(JsonFault("bom", "", "begins with a byte order mark", "save it as UTF-8 without BOM"))
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: byte {raw[error.start]:#04x} at {_place(raw[: error.start].decode())}"
        return None, [*faults, JsonFault("encoding", "", problem, "save it as UTF-8")]
    try:
        value, odd = _parse(text)
        deep = _too_deep(value)
    except RecursionError:
        value, odd, deep = None, False, True
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg.removesuffix(' at')} at {_place(text[: error.pos])}"
        if not text.strip():
            problem = "the file is empty"
        return None, [*faults, JsonFault("syntax", "", problem, _syntax_remedy(text, error.pos))]
    half = _half_pair(text)
    if half >= 0:
        problem = f"not JSON: half of a surrogate pair at {_place(text[:half])}"
        remedy = "write the character itself, or both halves"
        return None, [*faults, JsonFault("syntax", "", problem, remedy)]
    if deep:
        problem = f"nested deeper than {MAX_DEPTH} levels"
        return None, [*faults, JsonFault("depth", "", problem, "is this the right file?")]
    return value, faults + (list(itertools.islice(_odd_faults(value), MAX_FAULTS)) if odd else [])


def _parse(text: str) -> tuple[Any, bool]:
    """Return the value, and whether it contains an odd value, so that a second pass must find its place."""
    odd = False

    def take_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal odd
        value = dict(pairs)
        if len(value) == len(pairs):
            return value
        odd = True
        return _Repeated(pairs)

    def take_number(digits: str) -> Any:
        nonlocal odd
        if len(digits) <= MAX_DIGITS:
            return int(digits)
        odd = True
        return _Odd(digits[:MAX_DIGITS])

    def take_constant(name: str) -> Any:
        nonlocal odd
        odd = True
        return _Odd(name)

    def take_fraction(digits: str) -> Any:
        nonlocal odd
        number = float(digits)
        if math.isfinite(number):
            return number
        odd = True
        return _Odd(digits[:MAX_DIGITS])

    value = json.loads(
        text,
        object_pairs_hook=take_object,
        parse_int=take_number,
        parse_float=take_fraction,
        parse_constant=take_constant,
    )
    return value, odd


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")


def _half_pair(text: str) -> int:
    r"""Return the position of half a surrogate pair (`\ud800`), which HCCL's parser refuses, or -1."""
    # The end of the first half of a pair.
    high = None
    for match in _ESCAPE.finditer(text) if "\\ud" in text or "\\uD" in text else ():
        code = int(match[1] or "0", 16)
        low = 0xDC00 <= code < 0xE000
        if low != (high == match.start()):
            return match.start() if high is None else high - 6
        high = match.end() if 0xD800 <= code < 0xDC00 else None
    return -1 if high is None else high - 6


def _odd_faults(value: Any, *path: object) -> Iterator[JsonFault]:
    """Yield a fault for each odd value that `_parse` marked. The caller has bounded the depth."""
    if isinstance(value, _Odd):
        problem = f"{value.text} is not a number in JSON"
        yield JsonFault("number", pointer(*path), problem, "write a plain number or a string")
    if isinstance(value, _Repeated):
        for key in value.repeated:
            problem = f"the key {key[:80]!r} is repeated"
            remedy = "keep one: readers differ on which one counts"
            yield JsonFault("duplicate-key", pointer(*path, key), problem, remedy)
    if isinstance(value, (dict, list)):
        items: Iterable[tuple[object, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for step, inner in items:
            yield from _odd_faults(inner, *path, step)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return False
        level = [
            inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return True


def _place(before: str) -> str:
    """Return `line 3 column 7` for the character after a text."""
    return f"line {before.count(chr(10)) + 1} column {len(before) - before.rfind(chr(10))}"


def _syntax_remedy(text: str, at: int) -> str:
    rest = text[at : at + 2]
    if rest in ("//", "/*") or rest[:1] == "#":
        return "JSON has no comments; remove them"
    if not text.strip():
        return "is this the right file?"
    if rest[:1] == "'":
        return "JSON uses double quotes"
    return "look before this place for a missing or extra comma, quote or bracket"
