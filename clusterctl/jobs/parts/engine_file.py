"""Replace the file of `train: {engine: {deepspeed: FILE}}` by its content, so that nodes do not need it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterctl.document import Document, load_document
from clusterctl.errors import Fault, InputFaults

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
