"""Set keys of a job file from the command line: `--set train.steps=100`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterctl import document as documents
from clusterctl.document import Document, load_document
from clusterctl.errors import Fault, InputFaults
from clusterctl.jobs import placeholders


def _given_value(name: str, given: str) -> Any:
    """Return the value of `--set NAME=GIVEN`: YAML, or a text that begins with a placeholder."""
    if placeholders.BEGINS_WITH_PLACEHOLDER.match(given):
        return given
    return documents.parse_document(given, f"--set {name}").value


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Return the document with `train.steps=100` and the like set in it, read by the rules of the file."""
    faults = []
    value = json.loads(json.dumps(document.value or {}))
    flags = set[tuple[str | int, ...]]()
    for text in overrides:
        name, equals, given = text.partition("=")
        keys = name.split(".")
        if not equals or not all(keys):
            faults.append(Fault(f"--set {text}", "must be KEY=VALUE", "as in --set train.steps=100"))
            continue
        section = value
        for key in keys[:-1]:
            inner = section.setdefault(key, {})
            if not isinstance(inner, dict):
                faults.append(
                    Fault(
                        f"--set {text}",
                        f"{key!r} is not a mapping in {document.source}",
                        "name a key above it, or a mapping",
                    )
                )
                break
            section = inner
        else:
            wanted = _given_value(name, given)
            flags.add(tuple(keys))
            if wanted is None and keys[0] == "train":
                # As if the file did not have the key: its default counts.
                section.pop(keys[-1], None)
            else:
                section[keys[-1]] = wanted
    if faults:
        raise InputFaults(faults)
    return Document(document.source, value, document.lines, frozenset(flags))


KEY = ("train", "engine", "deepspeed")
"""The configuration of the embedded trainer: JSON that the trainer alone understands; None for a command."""


def with_engine_file(
    train: dict[str, object] | None, document: Document, path: Path
) -> tuple[dict[str, object] | None, Document]:
    """Return a job's train part and document with the content of the file; faults then name the lines of the file."""
    engine = (train or {}).get("engine")
    name = engine.get("deepspeed") if isinstance(engine, dict) else None
    if not isinstance(name, str):
        return train, document
    file = Path(name).expanduser()
    included = load_document(file if file.is_absolute() else path.parent / file)
    if not isinstance(included.value, dict):
        raise InputFaults(
            [Fault(included.source, "is not a mapping of DeepSpeed's settings", "name its JSON file")]
        )
    changed = {**(train or {}), "engine": {"deepspeed": included.value}}
    return changed, replace(document, included={**document.included, KEY: included})
