"""Options of a command from the fields of dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from clusterctl.cli import options
from clusterctl.wire.arguments import option_name, plain_type
from clusterctl.wire.fields import rule_of, types_of


def option_of(kind: Any, field: Any) -> Any:
    """Return the annotation by which typer reads a field that `clusterctl.wire` declares."""
    # Most commands have no such options.
    from typer.main import get_click_type

    from clusterctl.wire.schema import explanations

    rule, hint, name = rule_of(field), types_of(kind)[field.name], option_name(field.name)
    plain, text = plain_type(hint), explanations(kind)[field.name]
    if plain is bool:
        return Annotated[hint, typer.Option(name if hint is bool else f"{name}/--no-{name[2:]}", help=text)]
    more: dict[str, object] = {}
    if rule.choices:
        more["callback"] = options.one_of([str(choice) for choice in rule.choices if choice != ""])
    elif plain in (int, float):
        least = rule.least if rule.above is None else rule.above
        limits: Any = get_click_type(annotation=plain, parameter_info=typer.Option(min=least, max=rule.most))
        if rule.above is not None:
            limits.min_open = True
        more["click_type"] = limits
    wanted: Any = list[plain] if get_origin(hint) is tuple else plain  # type: ignore[valid-type]
    empty = field.default is None or field.default in ("", ())
    option: Any = typer.Option(*filter(None, (name, rule.short)), metavar=rule.metavar, help=text, **more)  # type: ignore[call-overload]
    return Annotated[wanted | None if empty else wanted, option]


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field of a dataclass and of the groups in it."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from _parameters(hints[field.name])
            continue
        declared = "rule" in field.metadata
        annotation = option_of(kind, field) if declared else _annotated(field.name, hints[field.name], field)
        default = None if declared and field.default in ("", ()) else field.default
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=annotation,
        )


def _annotated(name: str, kind: Any, field: Any) -> Any:
    """Return the annotation by which typer reads a value that `options.option` declares."""
    make = field.metadata.get("option")
    return Annotated[kind, make(option_name(name))] if make else kind


def _made(kind: Any, take: Callable[[str], Any]) -> Any:
    """Return a dataclass made of the values of its parameters, each of which `take` returns by name."""
    found, hints = {}, get_type_hints(kind)
    for field in fields(kind):
        is_group = is_dataclass(hints[field.name])
        found[field.name] = _made(hints[field.name], take) if is_group else take(field.name)
    # An option that is not given may stand for another empty value.
    return kind(**{name: value for name, value in found.items() if value is not None})


def flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as typer needs it: a dataclass parameter becomes one parameter for each of its fields."""
    groups: dict[str, type[Any]] = {}
    flattened: list[inspect.Parameter] = []
    # Unlike these types, those that Python 3.10's `get_type_hints` returns are wrapped where the default is None.
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind, field = parameter.annotation, parameter.default
        if isinstance(kind, type) and is_dataclass(kind):
            groups[name] = kind
            flattened += _parameters(kind)
            continue
        if isinstance(field, Field):
            parameter = parameter.replace(annotation=_annotated(name, kind, field), default=field.default)
        flattened.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> Any:
        for name, kind in groups.items():
            values[name] = _made(kind, values.pop)
        return function(**values)

    call.__doc__ = function.__doc__
    call.__signature__ = inspect.Signature(flattened)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flattened}
    return call
