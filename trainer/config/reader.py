"""Read mappings into frozen dataclasses; report every fault, with the most similar known key."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from trainer.errors import UNKNOWN_KEY, Fault

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_EXAMPLES = {int: "as in 8", float: "as in 0.5 or 1e-4", bool: "true or false", str: "put it in quotes"}


class _Bad:
    """Replaces a value whose fault is already recorded."""


BAD = _Bad()


def setting(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[object] = (),
    required: bool = False,
    read: Callable[[object], Any] | None = None,
) -> Any:
    """Return a dataclass field with the bounds of its value; `read` makes the value, or raises ValueError."""
    bounds: dict[str, object] = {"least": least, "above": above, "below": below, "choices": tuple(choices)}
    bounds |= {"required": required, "read": read}
    return field(default=default, metadata=bounds)


def closest_match(word: str, known: Sequence[str]) -> str:
    """Return `did you mean 'steps'?`, or the list of known words if none is similar."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {match[0]!r}?" if match else "known: " + ", ".join(known)


def read_section(kind: type[T], raw: object, key: str, faults: list[Fault], start: T | None = None) -> T:
    """Build `kind` from a mapping; what is not given comes from `start`, or from the defaults.

    Faults are added to `faults`; the value may then only be used to find further faults.
    """
    begin = kind() if start is None else start
    if not isinstance(raw, Mapping):
        faults.append(Fault(key, f"is {_shown(raw)}; a mapping is needed", "as in {key: value}"))
        return begin
    hints = _types_of(typing.cast(Any, kind))
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    faults += [
        Fault(f"{key}.{name}", UNKNOWN_KEY, closest_match(str(name), known))
        for name in raw
        if name not in known
    ]
    values = {}
    for item in fields(kind):  # type: ignore[arg-type]
        where = f"{key}.{item.name}"
        if item.name in raw:
            # A section within a named size changes that size's own section.
            inner = None if start is None else getattr(start, item.name)
            value = _read_field(item.metadata, hints[item.name], raw[item.name], where, faults, inner)
            if value is not BAD and _within(item.metadata, value, where, faults):
                values[item.name] = value
        elif item.metadata.get("required") and start is None:
            faults.append(Fault(where, "missing", f"add `{item.name}:`"))
    return kind(**{**{name: getattr(begin, name) for name in known}, **values})


@cache
def _types_of(kind: Hashable) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _read_field(
    bounds: Mapping[str, Any], kind: Any, raw: object, key: str, faults: list[Fault], start: Any
) -> Any:
    if start is not None and is_dataclass(kind):
        return read_section(typing.cast("type[Any]", kind), raw, key, faults, start)
    if bounds.get("read") is None:
        return read_value(kind, raw, key, faults)
    try:
        return bounds["read"](raw)
    except ValueError as error:
        faults.append(Fault(key, str(error)))
        return BAD


def read_value(kind: Any, raw: object, key: str, faults: list[Fault]) -> Any:
    """Return a value of a field's type, or BAD after adding the fault to the list."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(kind), raw, key, faults)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), raw, key, faults)
    if origin is dict:
        return _read_names(raw, key, faults)
    if is_dataclass(kind):
        return read_section(typing.cast("type[Any]", kind), raw, key, faults)
    return _read_plain(kind, raw, key, faults)


def _read_plain(kind: type, raw: object, key: str, faults: list[Fault]) -> Any:
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    right = isinstance(raw, kind) and (kind is bool or not isinstance(raw, bool))
    if right and not (isinstance(raw, float) and not math.isfinite(raw)):
        return raw
    remedy = _EXAMPLES[kind]
    if raw is None:
        remedy = "write a value, or leave the key out"
    elif kind is int and isinstance(raw, str) and re.fullmatch("[-+]?[0-9]{19,}", raw, re.ASCII):
        remedy = "write a number of at most 18 digits"
    elif kind in (int, float) and isinstance(raw, str) and re.fullmatch("[-+0-9.eE]{1,20}", raw, re.ASCII):
        remedy = "write it as a number, without quotes"
    elif kind is int and isinstance(raw, float) and math.isfinite(raw):
        remedy = f"write {int(raw)}"
    faults.append(Fault(key, f"is {_shown(raw)}; {_WORDS[kind]} is needed", remedy))
    return BAD


def _read_union(kinds: Sequence[Any], raw: object, key: str, faults: list[Fault]) -> Any:
    if raw is None and type(None) in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not type(None)]
    if len(wanted) > 1 and isinstance(raw, Mapping):
        wanted = [kind for kind in wanted if typing.get_origin(kind) is dict]
    return read_value(wanted[0], raw, key, faults)


def _read_tuple(kinds: Sequence[Any], raw: object, key: str, faults: list[Fault]) -> Any:
    if len(kinds) == 2 and kinds[1] is ...:
        if not isinstance(raw, (list, tuple)):
            faults.append(Fault(key, f"is {_shown(raw)}; a list is needed", "as in [a, b]"))
            return BAD
        kinds = (kinds[0],) * len(raw)
    if not isinstance(raw, (list, tuple)) or len(raw) != len(kinds):
        faults.append(Fault(key, f"is {_shown(raw)}; a list of {len(kinds)} is needed"))
        return BAD
    paired = enumerate(zip(kinds, raw, strict=True))
    values = tuple(read_value(kind, each, f"{key}[{i}]", faults) for i, (kind, each) in paired)
    return BAD if BAD in values else values


def _read_names(raw: object, key: str, faults: list[Fault]) -> Any:
    if isinstance(raw, Mapping) and all(isinstance(k, str) and isinstance(v, str) for k, v in raw.items()):
        return dict(raw)
    faults.append(Fault(key, f"is {_shown(raw)}; a name, or a mapping of names to names is needed"))
    return BAD


def _within(bounds: Mapping[str, Any], value: object, key: str, faults: list[Fault]) -> bool:
    """Return whether a value (or each part of a tuple) keeps its field's bounds."""
    choices = bounds.get("choices", ())
    if choices and value not in choices:
        listed = ", ".join(str(choice) for choice in choices if choice != "")
        remedy = closest_match(value, [str(c) for c in choices]) if isinstance(value, str) else ""
        # The error lists the allowed values already.
        remedy = remedy if remedy.startswith("did you mean") else ""
        faults.append(Fault(key, f"is {_shown(value)}; one of {listed} is needed", remedy))
        return False
    wrong = ""
    for part in value if isinstance(value, tuple) else (value,):
        if not isinstance(part, (int, float)) or isinstance(part, bool):
            continue
        if bounds.get("least") is not None and part < bounds["least"]:
            wrong = f"at least {bounds['least']}"
        elif bounds.get("above") is not None and part <= bounds["above"]:
            wrong = f"more than {bounds['above']}"
        elif bounds.get("below") is not None and part >= bounds["below"]:
            wrong = f"less than {bounds['below']}"
    if wrong:
        faults.append(
            Fault(key, f"is {_shown(value)}; {wrong} is needed", "correct the value, or leave the key out")
        )
    return not wrong


def _shown(value: object) -> str:
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
