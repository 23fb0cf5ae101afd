"""The file of `train: {engine: {deepspeed: FILE}}`: read here and put in its place, so that nodes do not need it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.document import Document, load_document
from clusterctl.errors import Fault, InputFaults

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job

KEY = ("train", "engine", "deepspeed")


def with_engine_file(job: Job, document: Document, path: Path) -> tuple[Job, Document]:
    """Return a job and its document with the content of the file; faults then name the lines of the file."""
    engine = (job.train or {}).get("engine")
    name = engine.get("deepspeed") if isinstance(engine, dict) else None
    if not isinstance(name, str):
        return job, document
    file = Path(name).expanduser()
    included = load_document(file if file.is_absolute() else path.parent / file)
    if not isinstance(included.value, dict):
        raise InputFaults(
            [Fault(included.source, "is no mapping of DeepSpeed's settings", "name its JSON file")]
        )
    train = {**(job.train or {}), "engine": {"deepspeed": included.value}}
    return replace(job, train=train), replace(document, included={**document.included, KEY: included})
