"""Find the rank table of a job (`rank_table: FILE`), and check it against the job's nodes and devices."""

from __future__ import annotations

from pathlib import Path

from clusterctl.errors import did_you_mean
from clusterctl.wire.fields import BAD, Key, Reader

CHOICES = ("auto", "always", "never")
# The JSON schema of the key.
FORM = {"anyOf": [{"enum": list(CHOICES)}, {"type": "string", "pattern": "/|[.]json$"}]}


def take_rank_table(reader: Reader, value: object, key: Key) -> object:
    """Return one of the choices, or the path of a table; a relative one is next to the job file."""
    text = str(value)
    if text in CHOICES:
        return text
    if not ("/" in text or text.endswith(".json")):
        remedy = did_you_mean(text, CHOICES) or f"one of {', '.join(CHOICES)}, or a file: ./table.json"
        reader.report(key, f"unknown {value!r}", remedy)
        return BAD
    file = reader.folder / Path(text).expanduser()
    if not file.is_file():
        reader.report(key, f"no file {file}", "a path is relative to the job file; auto builds a table")
        return BAD
    return str(file.resolve())


def file_of(choice: str) -> Path | None:
    """Return the file of a job's `rank_table`; None for the other choices."""
    return None if choice in CHOICES else Path(choice)
