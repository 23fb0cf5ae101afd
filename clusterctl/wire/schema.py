"""Build the JSON schema of a dataclass of settings, so that editors complete and explain its keys."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from clusterctl.wire.fields import Rule, keys_of, rule_of, types_of

PLAIN = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "string"}
# What is read as text may be written as a number.
TEXT = {"type": ["string", "number"]}


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the schema of a mapping that `kind` declares, with the docstring of each field as its description."""
    hints, texts = types_of(kind), explanations(kind)
    properties, required = {}, []
    for item in keys_of(kind):
        rule = rule_of(item)
        schema = dict(rule.form) if rule.form is not None else _value(hints[item.name], rule)
        if rule.long is not None:
            schema = {"anyOf": [schema, schema_of(rule.long)]}
        if texts.get(item.name):
            schema["description"] = texts[item.name]
        default = item.default
        # What is written as a size or a time is another value when it is read.
        plain = rule.form is None or isinstance(default, str)
        if plain and default not in (MISSING, None, "", ()) and not rule.required:
            schema["default"] = list(default) if isinstance(default, tuple) else default
        properties[item.name] = schema
        if rule.required:
            required.append(item.name)
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _value(kind: Any, rule: Rule) -> dict[str, Any]:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if rule.read is not None and not rule.choices:
        return dict(TEXT)
    if origin in (typing.Union, types.UnionType):
        found = [_value(choice, rule) for choice in inside if choice is not type(None)]
        return found[0] if len(found) == 1 else {"anyOf": found}
    if origin is tuple:
        length = {} if inside[-1] is ... else {"minItems": len(inside), "maxItems": len(inside)}
        return {"type": "array", "items": _value(inside[0], rule), **length}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if is_dataclass(kind):
        return schema_of(kind)
    if rule.choices:
        return {"enum": list(rule.choices)}
    schema: dict[str, Any] = {"type": PLAIN[kind]}
    if rule.pattern is not None:
        # JSON schemas have the expressions of JavaScript, which names groups in another way.
        schema["pattern"] = "^({})$".format(rule.pattern.pattern.replace("(?P<", "(?<"))
    names = {"least": "minimum", "most": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
    limits = {word: getattr(rule, name) for name, word in names.items()}
    return schema | {word: limit for word, limit in limits.items() if limit is not None}


@cache
def explanations(kind: Any) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of those that it extends, by field."""
    found: dict[str, str] = {}
    bases: list[Any] = [base for base in kind.__bases__ if is_dataclass(base)]
    for base in bases:
        found |= explanations(base)
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(made, ast.ClassDef)
    for field, after in zip(made.body, made.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(field.target, ast.Name)
        ):
            value = ast.literal_eval(after.value)
            found[field.target.id] = " ".join(str(value).split())
    return found
