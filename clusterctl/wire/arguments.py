"""Options on a command line from the fields that declare them: written, parsed and checked."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from clusterctl.wire.fields import Checked, keys_of, misfit, rule_of, types_of

T = TypeVar("T")


def option_name(field: str) -> str:
    """Return the option of a field: `--top-k` for `top_k`."""
    return "--" + field.replace("_", "-")


def plain_type(kind: Any) -> Any:
    """Return the type of one value: int for `int | None` and for `tuple[int, ...]`."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(choice for choice in typing.get_args(kind) if choice is not type(None))
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def add_arguments(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Add an option for each field of a group."""
    for item in keys_of(kind):
        name, hint = option_name(item.name), types_of(kind)[item.name]
        if hint is bool:
            parser.add_argument(name, action="store_true")
        elif plain_type(hint) is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction)
        elif typing.get_origin(hint) is tuple:
            parser.add_argument(name, action="append", type=plain_type(hint), default=[])
        else:
            plain = plain_type(hint)
            # argparse would call `str` with the default, as with a word of the user.
            more = {} if plain is str else {"type": plain}
            parser.add_argument(name, default=item.default, **more)


def arguments_of(group: Any) -> list[str]:
    """Return the options that give a group's values to another process."""
    found = list[str]()
    for item in keys_of(group):
        name, value = option_name(item.name), getattr(group, item.name)
        if isinstance(value, bool):
            absent = [] if item.default is False else [f"--no-{name[2:]}"]
            found += [name] if value else absent
        elif isinstance(value, (list, tuple)):
            found += [f"{name}={each}" for each in value]
        elif value is not None and value != "":
            found.append(f"{name}={value}")
    return found


def group_of(kind: type[T], arguments: argparse.Namespace) -> T:
    """Return the values of a group's options."""
    values = {item.name: getattr(arguments, item.name) for item in keys_of(kind)}
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )


def wrong_options(*groups: Any) -> Iterator[str]:
    """Yield a line for each value that its field does not allow."""
    for group in groups:
        for item in keys_of(group):
            problem, remedy = misfit(rule_of(item), getattr(group, item.name))
            if problem:
                yield f"{option_name(item.name)}: {problem} ({remedy})"
        if isinstance(group, Checked):
            yield from (f"{option_name(name)}: {problem}" for name, problem, _ in group.problems())
