"""Options on a command line from the fields that declare them: written, parsed and checked."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, is_dataclass
from typing import Any, TypeVar

from clusterctl.wire.fields import Checked, keys_of, misfit, rule_of, types_of

T = TypeVar("T")


def option_name(field: str) -> str:
    """Return the option of a field: `--top-k` for `top_k`, `--from` for `from_`."""
    return "--" + field.rstrip("_").replace("_", "-")


def plain_type(kind: Any) -> Any:
    """Return the type of one value: int for `int | None` and for `tuple[int, ...]`."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(choice for choice in typing.get_args(kind) if choice is not type(None))
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def add_arguments(parser: argparse.ArgumentParser, kind: Any, *, explained: bool = False) -> None:
    """Add an argument for each field of a request, and of the groups in it; `explained`: with its text."""
    texts: dict[str, str] = {}
    if explained:
        from clusterctl.wire.schema import explanations

        texts = explanations(kind)
    for item in _in_order(kind):
        hint: Any = types_of(kind)[item.name]
        if is_dataclass(hint):
            add_arguments(parser, hint, explained=explained)
            continue
        rule, text = rule_of(item), texts.get(item.name, "").replace("%", "%%")
        more: Any = {"help": argparse.SUPPRESS if rule.hidden else text or None}
        if plain_type(hint) is bool:
            more["action"] = "store_true" if hint is bool else argparse.BooleanOptionalAction
            parser.add_argument(option_name(item.name), **more)
            continue
        plain = plain_type(hint)
        # argparse would call `str` with the default, as with a word of the user.
        more |= {"type": _reading(rule.read)} if rule.read else {} if plain is str else {"type": plain}
        if typing.get_origin(hint) is tuple:
            more |= {"nargs": "+"} if rule.positional else {"nargs": "+", "action": "extend", "default": []}
        if rule.positional:
            parser.add_argument(item.name, **more)
            continue
        more["required"] = rule.required or item.default is MISSING
        parser.add_argument(
            option_name(item.name), **{"default": item.default, **more}, metavar=rule.metavar, dest=item.name
        )


def _in_order(kind: Any) -> list[Any]:
    """Return the fields that people write: first those that are needed, and those of a class before its bases'."""
    ranks = {
        name: rank
        for rank, base in reversed([*enumerate(kind.__mro__)])
        for name in vars(base).get("__annotations__", ())
    }

    def place(item: Any) -> tuple[bool, bool, int]:
        rule = rule_of(item)
        is_needed = rule.required or item.default is MISSING
        return not rule.positional, not is_needed, ranks[item.name]

    return sorted(keys_of(kind), key=place)


def _reading(read: Callable[[object], Any]) -> Callable[[str], Any]:
    """Return a type of argparse that reports the message of the error."""

    def typed(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def arguments_of(request: Any) -> list[str]:
    """Return the arguments that give the values of a request, or of a group, to another process."""
    found = list[str]()
    for item in keys_of(request):
        name, value = option_name(item.name), getattr(request, item.name)
        if is_dataclass(value):
            found += arguments_of(value)
        elif isinstance(value, bool):
            absent = [] if item.default is False else [f"--no-{name[2:]}"]
            found += [name] if value else absent
        elif rule_of(item).positional:
            found += [str(each) for each in (value if isinstance(value, tuple) else (value,))]
        elif isinstance(value, (list, tuple)):
            found += [f"{name}={each}" for each in value]
        elif value is not None and (value != "" or item.default is None):
            found.append(f"{name}={value}")
    return found


def group_of(kind: Callable[..., T], arguments: argparse.Namespace) -> T:
    """Return the values that were parsed for a request or a group."""
    values, hints = dict[str, object](), types_of(kind)
    groups: Any = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    for item in keys_of(kind):
        name = item.name
        value = group_of(groups[name], arguments) if name in groups else getattr(arguments, name)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def wrong_options(*groups: Any) -> Iterator[str]:
    """Yield a line for each value that its field does not allow."""
    for group in groups:
        for item in keys_of(group):
            value = getattr(group, item.name)
            if is_dataclass(value):
                yield from wrong_options(value)
                continue
            problem, remedy = misfit(rule_of(item), value)
            if problem:
                yield f"{option_name(item.name)}: {problem} ({remedy})"
        if isinstance(group, Checked):
            yield from (f"{option_name(name)}: {problem}" for name, problem, _ in group.problems())
