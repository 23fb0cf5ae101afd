"""Build the JSON schema of the `train:` part from the config's fields, so that editors complete and explain them."""

from __future__ import annotations

from clusterctl.wire.schema import schema_of
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.config.train_config import TrainConfig
from trainer.json_types import JsonObject


def train_schema() -> JsonObject:
    """Return the schema of the whole part."""
    schema = schema_of(TrainConfig)
    properties = schema["properties"]
    names = {"enum": list(SIZES)}
    model = schema_of(ModelConfig)
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
