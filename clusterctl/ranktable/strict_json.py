"""JSON read without forgiveness: what Python's reader lets pass in silence is a fault with its place.

Python keeps the last of two equal keys, takes NaN, half of a surrogate pair and 1e999, and fails with a
traceback on deep nesting, a 5,000-digit number or bad UTF-8. A rank table with any of these means something
else to every program that reads it.
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

# 10,000 servers with 8 devices each are 15 MB.
MAX_BYTES = 64 << 20
# The deepest vendor form (version 2.0) has 7 levels.
MAX_DEPTH = 32
MAX_DIGITS = 20
MAX_FAULTS = 1000

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonFault:
    """One thing wrong with a JSON text; `kind` is a stable word, `pointer` is empty where there is none."""

    kind: str
    pointer: str
    what: str
    remedy: str

    @property
    def fatal(self) -> bool:
        """Whether it left no value."""
        return self.kind in ("size", "encoding", "depth", "syntax")


@dataclass(frozen=True)
class _Odd:
    """Stands where a value can't be kept: NaN, or a number without end."""

    text: str


class _Repeated(dict[str, Any]):
    """An object in which keys are given more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def pointer(*parts: object) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def read_json(raw: bytes) -> tuple[Any, list[JsonFault]]:
    """The value, None where there is none, and every fault of the text."""
    faults: list[JsonFault] = []
    if len(raw) > MAX_BYTES:
        what = f"larger than {MAX_BYTES >> 20} MB"
        return None, [JsonFault("size", "", what, "is this the right file?")]
    if raw.startswith(BOM):
        raw = raw[len(BOM) :]
        faults.append(JsonFault("bom", "", "begins with a byte order mark", "save it as UTF-8 without BOM"))
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: byte {raw[error.start]:#04x} at {_place(raw[: error.start].decode())}"
        return None, [*faults, JsonFault("encoding", "", what, "save it as UTF-8")]
    try:
        value, odd = _parse(text)
        deep = _too_deep(value)
    except RecursionError:
        value, odd, deep = None, False, True
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg.removesuffix(' at')} at {_place(text[: error.pos])}"
        if not text.strip():
            what = "the file is empty"
        return None, [*faults, JsonFault("syntax", "", what, _syntax_remedy(text, error.pos))]
    half = _half_pair(text)
    if half >= 0:
        what = f"not JSON: half of a surrogate pair at {_place(text[:half])}"
        remedy = "write the character itself, or both halves"
        return None, [*faults, JsonFault("syntax", "", what, remedy)]
    if deep:
        what = f"nested deeper than {MAX_DEPTH} levels"
        return None, [*faults, JsonFault("depth", "", what, "is this the right file?")]
    return value, faults + (list(itertools.islice(_odd_faults(value), MAX_FAULTS)) if odd else [])


def _parse(text: str) -> tuple[Any, bool]:
    """The value, and whether anything odd is in it: only then is it worth a walk."""
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
    r"""Where a text that was parsed has `\ud800` without its other half, which HCCL's reader refuses; or -1."""
    # The end of a first half.
    high = None
    for match in _ESCAPE.finditer(text) if "\\ud" in text or "\\uD" in text else ():
        code = int(match[1] or "0", 16)
        low = 0xDC00 <= code < 0xE000
        if low != (high == match.start()):
            return match.start() if high is None else high - 6
        high = match.end() if 0xD800 <= code < 0xDC00 else None
    return -1 if high is None else high - 6


def _odd_faults(value: Any, *path: object) -> Iterator[JsonFault]:
    """What `_parse` marked, with the place of each; the depth is bounded before."""
    if isinstance(value, _Odd):
        what = f"{value.text} is no number that JSON has"
        yield JsonFault("number", pointer(*path), what, "write a plain number or a string")
    if isinstance(value, _Repeated):
        for key in value.repeated:
            what = f"the key {key[:80]!r} is given more than once"
            remedy = "keep one: readers differ on which one counts"
            yield JsonFault("duplicate-key", pointer(*path, key), what, remedy)
    if isinstance(value, (dict, list)):
        items: Iterable[tuple[object, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for step, inner in items:
            yield from _odd_faults(inner, *path, step)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [one for one in level if isinstance(one, (dict, list))]
        if not containers:
            return False
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    return True


def _place(before: str) -> str:
    """`line 3 column 7` of the character after a text."""
    return f"line {before.count(chr(10)) + 1} column {len(before) - before.rfind(chr(10))}"


def _syntax_remedy(text: str, at: int) -> str:
    rest = text[at : at + 2]
    if rest in ("//", "/*") or rest[:1] == "#":
        return "JSON has no comments; take them out"
    if not text.strip():
        return "is this the right file?"
    if rest[:1] == "'":
        return "JSON quotes with double quotes"
    return "look just before that place for a missing or extra comma, quote or bracket"
