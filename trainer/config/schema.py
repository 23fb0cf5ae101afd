"""Build the JSON schema of the `train:` part from the config's fields, so that editors complete and explain them."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.config.train_config import TrainConfig
from trainer.json_types import JsonObject

PLAIN = {int: "integer", float: "number", bool: "boolean", str: "string"}


def train_schema() -> JsonObject:
    """Return the schema of the whole part."""
    schema = _object(TrainConfig)
    properties = schema["properties"]
    names = {"enum": list(SIZES)}
    model = _object(ModelConfig)
    model["properties"]["name"] = {**names, "description": "A named size that the other keys change."}
    properties["model"] = {**_text(properties["model"]), "anyOf": [names, model]}
    # `length` or a task's epochs may replace `steps`.
    schema["required"] = sorted({*schema.get("required", []), "model"} - {"steps"})
    _short(properties, "parallel", {"const": "auto"})
    _short(properties, "init", {"type": "string"})
    engine = {"type": "object", "properties": {"deepspeed": {"type": ["string", "object"]}}}
    properties["engine"] = {
        **_text(properties["engine"]),
        "anyOf": [properties["engine"], {**engine, "additionalProperties": False, "required": ["deepspeed"]}],
    }
    del properties["deepspeed"]
    _short(properties, "recompute", {"enum": properties["recompute"]["properties"]["mode"]["enum"]})
    _short(properties, "loss_scale", {"const": "dynamic"}, {"type": "number", "minimum": 1})
    _short(properties["save"]["properties"], "keep", {"type": "integer", "minimum": 1})
    _short_sources(properties["data"]["properties"])
    return schema


def _short(properties: dict[str, JsonObject], key: str, *shorts: JsonObject) -> None:
    """Allow short forms (a word or a number) for a section."""
    long = properties[key]
    properties[key] = {**_text(long), "anyOf": [*shorts, long]}


def _short_sources(data: dict[str, JsonObject]) -> None:
    """Allow one corpus, or its prefix alone, in place of a list of corpora or of an item."""
    for key in ("blend", "train", "valid"):
        choice = {"anyOf": [{"type": "string"}, data[key]["items"]]}
        data[key] = {**_text(data[key]), "anyOf": [*choice["anyOf"], {"type": "array", "items": choice}]}


def _text(schema: JsonObject) -> JsonObject:
    return {"description": schema["description"]} if "description" in schema else {}


def _object(kind: Any) -> JsonObject:
    hints, texts = typing.get_type_hints(kind), explanations(kind)
    properties, required = {}, []
    for item in fields(kind):
        bounds = item.metadata
        free = bounds.get("read") and not bounds.get("choices")
        schema = {"type": ["string", "number"]} if free else _value(hints[item.name], bounds)
        schema = {**schema, "description": texts.get(item.name, "")}
        default = item.default
        if default is not MISSING and default is not None and not bounds.get("required"):
            schema["default"] = list(default) if isinstance(default, tuple) else default
        properties[item.name] = {key: value for key, value in schema.items() if value != ""}
        if bounds.get("required"):
            required.append(item.name)
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _value(kind: Any, bounds: typing.Mapping[str, Any]) -> JsonObject:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        wanted = [choice for choice in inside if choice is not type(None)]
        found = [_value(choice, bounds) for choice in wanted]
        found += [{"type": "null"}] * (len(wanted) < len(inside))
        return found[0] if len(found) == 1 else {"anyOf": found}
    if origin is tuple:
        items = _value(inside[0], bounds)
        length = {} if inside[-1] is ... else {"minItems": len(inside), "maxItems": len(inside)}
        return {"type": "array", "items": items, **length}
    if origin is dict:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if is_dataclass(kind):
        return _object(kind)
    schema: JsonObject = {"type": PLAIN[kind]}
    if bounds.get("choices"):
        return {"enum": list(bounds["choices"])}
    names = {"least": "minimum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
    return schema | {word: bounds[key] for key, word in names.items() if bounds.get(key) is not None}


@cache
def explanations(kind: Any) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, by field."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(made, ast.ClassDef)
    found = {}
    for field, after in zip(made.body, made.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(field.target, ast.Name)
        ):
            value = ast.literal_eval(after.value)
            found[field.target.id] = " ".join(str(value).split())
    return found
