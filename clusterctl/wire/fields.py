"""One declaration of a value that people write: its type, default and limits, from which it is read and described.

A frozen dataclass declares the keys of a mapping, each as a `setting` with a docstring below it. `Reader` makes such
an object from a mapping and reports every error; `clusterctl.wire.schema` makes a JSON schema from the same fields.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Key = tuple[str | int, ...]
"""The place of a value in a document: ("nodes", "node1", "port")."""
Report = Callable[[Key, str, str], None]
"""Takes the place of an error, the problem and a remedy."""
Problem = tuple[str, str, str]
"""A key of a mapping, what is wrong with its value, and a remedy."""

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
EXAMPLES = {
    int: "as in 8",
    float: "as in 0.5 or 1e-4",
    bool: "true or false",
    str: "put it in quotes",
    list: "as in [a, b]",
    dict: "as in {key: value}",
}
OWN = {"own": True}
"""Metadata of a field that no one writes: the program fills it."""


@dataclass(frozen=True)
class Rule:
    """What a value must be, beyond its type."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[object, ...] = ()
    pattern: re.Pattern[str] | None = None
    """A text, or each text of a list, has this form, unless it is empty."""
    noun: str = ""
    """What a text of this pattern is: `one word`."""
    example: str = ""
    """The remedy."""
    required: bool = False
    metavar: str = "N"
    """What the value is called in the help of an option."""
    short: str = ""
    """The option's short name, as in `-o`."""
    positional: bool = False
    """On a command line it is an argument without a name."""
    hidden: bool = False
    """The help leaves it out."""
    read: Callable[[object], Any] | None = None
    """Makes the value of what is written; raises ValueError with a problem and a remedy."""
    take: Callable[[Reader, object, Key], Any] | None = None
    """Makes the value of a part with several forms; reports errors to the reader and then returns BAD."""
    form: Mapping[str, object] | None = None
    """The JSON schema of what `read` or `take` accepts."""
    long: type[object] | None = None
    """The dataclass of the long form, next to `form`."""


NO_RULE = Rule()


def setting(
    default: Any = MISSING, *, factory: Callable[[], Any] | None = None, hashed: bool = True, **rule: Any
) -> Any:
    """Return a field of a dataclass whose values people write; `rule` has the entries of a Rule."""
    metadata = {"rule": Rule(**rule)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata, hash=False)
    return field(default=default, metadata=metadata, hash=None if hashed else False)


def own(default: Any = MISSING, **more: Any) -> Any:
    """Return a field that is not written by people: it has no key."""
    return field(default=default, metadata=OWN, **more)


def keys_of(kind: Any) -> list[Any]:
    """Return the fields of a dataclass that people write; those that only a keyword sets come last."""
    written = [item for item in fields(kind) if not item.metadata.get("own")]
    return sorted(written, key=lambda item: item.kw_only)


def rule_of(item: Any) -> Rule:
    """Return the rule of a field."""
    return typing.cast(Rule, item.metadata.get("rule", NO_RULE))


class Checked:
    """A mapping whose keys have rules between them."""

    def problems(self) -> Iterable[Problem]:
        """Yield what is wrong between the keys, each of which is right for itself."""
        return ()


def closest_match(word: str, known: Sequence[str]) -> str:
    """Return `did you mean 'steps'?`, or the list of known words if none is similar."""
    import difflib

    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {match[0]!r}?" if match else "known: " + ", ".join(known)


@cache
def types_of(kind: Hashable) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    return typing.get_type_hints(kind)


class _Bad:
    """Replaces a value whose error is already reported."""


BAD = _Bad()


class Reader:
    """Reads mappings into dataclasses; wrong values are reported, and their defaults returned."""

    def __init__(self, report: Report, blank: bool = False, folder: Path | None = None) -> None:
        """`blank`: a key without a value counts as missing. A relative path is in `folder`."""
        self.report, self.blank, self.folder = report, blank, folder or Path()

    def read(
        self,
        kind: type[T],
        raw: object,
        key: Key = (),
        start: T | None = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> T:
        """Return a `kind` of a mapping; what it lacks comes from `start`, or from the defaults.

        `elsewhere` has remedies for keys of other mappings.
        """
        begin: Any = kind() if start is None else start
        given = self.given(kind, raw, key, start, elsewhere)
        if given is None:
            return begin  # type: ignore[no-any-return]
        for item in keys_of(kind) if start is None else ():
            rule, name = rule_of(item), item.name
            if rule.required and (given[name] == "" if name in given else self._is_absent(raw, name)):
                self.report((*key, name), f"{name!r} is missing", rule.example or f"add `{name}:`")
        made = kind(**{**{item.name: getattr(begin, item.name) for item in fields(begin)}, **given})
        for name, problem, remedy in made.problems() if isinstance(made, Checked) else ():
            self.report((*key, name) if name else key, problem, remedy)
        return made

    def _is_absent(self, raw: Any, name: str) -> bool:
        return name not in raw or (self.blank and raw[name] is None)

    def given(
        self,
        kind: Any,
        raw: object,
        key: Key = (),
        start: object = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> dict[str, Any] | None:
        """Return the values that a mapping gives, without those that are wrong; None if it is no mapping."""
        if not isinstance(raw, Mapping):
            self.report(key, f"must be a mapping, not {shown(raw)}", EXAMPLES[dict])
            return None
        items, hints = {item.name: item for item in keys_of(kind)}, types_of(kind)
        values = {}
        for name, value in raw.items():
            place = (*key, name)
            if name not in items:
                remedy = (elsewhere or {}).get(name) or closest_match(name, list(items))
                self.report(place, f"unknown key {name!r}", remedy)
            elif not (self.blank and value is None):
                inner = None if start is None else getattr(start, name)
                found = self._field(rule_of(items[name]), hints[name], value, place, inner)
                if found is not BAD:
                    values[name] = found
        return values

    def _field(self, rule: Rule, kind: Any, raw: object, key: Key, start: Any) -> Any:
        # A mapping within a named one changes that one's own part.
        if start is not None and is_dataclass(kind) and rule.take is None:
            return self.read(typing.cast("type[Any]", kind), raw, key, start)
        if rule.take is not None:
            value = rule.take(self, raw, key)
        elif rule.read is not None:
            try:
                value = rule.read(raw)
            except ValueError as error:
                problem, remedy = (*error.args, "")[:2]
                self.report(key, str(problem), str(remedy) or rule.example)
                return BAD
        else:
            value = self.value(kind, raw, key, rule.example)
        problem, remedy = misfit(rule, value) if value is not BAD else ("", "")
        if problem:
            self.report(key, problem, remedy)
        return BAD if problem else value

    def value(self, kind: Any, raw: object, key: Key, example: str = "") -> Any:
        """Return a value of a type, or BAD after an error was reported."""
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return self._union(inside, raw, key, example)
        if origin is tuple:
            return self._tuple(inside, raw, key, example)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(raw, key, example)
        if is_dataclass(kind):
            return self.read(typing.cast("type[Any]", kind), raw, key)
        if kind is Path:
            text = self._plain(str, raw, key, example)
            return text if text is BAD else self.folder / Path(text).expanduser()
        return self._plain(kind, raw, key, example)

    def _plain(self, kind: type, raw: object, key: Key, example: str) -> Any:
        number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
        if kind is float and number:
            # JSON and YAML have integers of any length.
            raw = float(raw) if isinstance(raw, float) or abs(raw) < 1 << 63 else math.inf  # type: ignore[arg-type]
        if kind is str and number:
            return str(raw)
        right = isinstance(raw, kind) and (kind is bool or not isinstance(raw, bool))
        if right and not (isinstance(raw, float) and not math.isfinite(raw)):
            return raw
        remedy = example or EXAMPLES[kind]
        if raw is None:
            remedy = "write a value, or leave the key out"
        elif kind is int and isinstance(raw, str) and re.fullmatch("[-+]?[0-9]{19,}", raw, re.ASCII):
            remedy = "write a number of at most 18 digits"
        elif (
            kind in (int, float) and isinstance(raw, str) and re.fullmatch("[-+0-9.eE]{1,20}", raw, re.ASCII)
        ):
            remedy = "write it as a number, without quotes"
        elif kind is int and isinstance(raw, float) and math.isfinite(raw):
            remedy = f"write {int(raw)}"
        self.report(key, f"must be {WORDS[kind]}, not {shown(raw)}", remedy)
        return BAD

    def _union(self, kinds: Sequence[Any], raw: object, key: Key, example: str) -> Any:
        if raw is None and type(None) in kinds:
            return None
        wanted = [kind for kind in kinds if kind is not type(None)]
        if len(wanted) > 1 and isinstance(raw, Mapping):
            wanted = [kind for kind in wanted if typing.get_origin(kind) is dict]
        return self.value(wanted[0], raw, key, example)

    def _tuple(self, kinds: Sequence[Any], raw: object, key: Key, example: str) -> Any:
        if not isinstance(raw, (list, tuple)):
            self.report(key, f"must be a list, not {shown(raw)}", example or EXAMPLES[list])
            return BAD
        if len(kinds) == 2 and kinds[1] is ...:
            kinds = (kinds[0],) * len(raw)
        if len(raw) != len(kinds):
            self.report(key, f"must be a list of {len(kinds)}, not {shown(raw)}", example)
            return BAD
        values = tuple(
            self.value(kind, each, (*key, number), example)
            for number, (kind, each) in enumerate(zip(kinds, raw, strict=True))
        )
        return BAD if BAD in values else values

    def _mapping(self, raw: object, key: Key, example: str) -> Any:
        if not isinstance(raw, Mapping):
            self.report(key, f"must be a mapping, not {shown(raw)}", example or EXAMPLES[dict])
            return BAD
        values = {str(name): self.value(str, each, (*key, str(name)), example) for name, each in raw.items()}
        return BAD if BAD in values.values() else values


def misfit(rule: Rule, value: object) -> tuple[str, str]:
    """Return what is wrong with a value, and a remedy; "" if nothing is."""
    for part in value if isinstance(value, tuple) else (value,):
        if part is None:
            continue
        if rule.choices and value not in rule.choices and part not in rule.choices:
            known = [str(choice) for choice in rule.choices if choice != ""]
            near = closest_match(str(part), known)
            one_of = near if near.startswith("did you mean") else f"one of {', '.join(known)}"
            return f"unknown {part!r}", rule.example or one_of
        if rule.pattern is not None and isinstance(part, str) and part and not rule.pattern.fullmatch(part):
            return f"{part[:80]!r} is not {rule.noun}", rule.example
        if not isinstance(part, (int, float)) or isinstance(part, bool):
            continue
        limits = (rule.least, rule.most, rule.above, rule.below)
        if isinstance(part, float) and math.isnan(part) and limits != (None,) * 4:
            return f"{part} is not a number", rule.example or range_of(rule)
        small = (rule.least is not None and part < rule.least) or (
            rule.above is not None and part <= rule.above
        )
        large = (rule.most is not None and part > rule.most) or (
            rule.below is not None and part >= rule.below
        )
        if small or large:
            word = "small" if small else "large"
            return f"{shown(part)} is too {word}", rule.example or range_of(rule)
    return "", ""


def range_of(rule: Rule) -> str:
    """Return the numbers that a rule allows, in words."""
    if rule.least is not None and rule.most is not None:
        return f"{rule.least:,} to {rule.most:,}"
    words = [
        f"{limit:,}" if word == "least" else f"{word} {limit:,}"
        for word, limit in (
            ("least", rule.least),
            ("more than", rule.above),
            ("at most", rule.most),
            ("less than", rule.below),
        )
        if limit is not None
    ]
    return (
        words[0] + " or more" + "".join(f", and {word}" for word in words[1:])
        if rule.least is not None
        else " and ".join(words)
    )


def shown(value: object) -> str:
    """Return a short form of a wrong value."""
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
