"""Read configuration files: MindFormers', DeepSpeed's and torchtitan's keys, and manifests with a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from clusterctl.document import Document, load_document
from clusterctl.errors import UsageError
from clusterctl.migrate import manifest
from clusterctl.migrate.found import Found, Given, options_by_name, plain
from clusterctl.migrate.tables import mindformers, torchtitan


def from_document(document: Document, path: Path) -> Found:
    """Return the training of a DeepSpeed job, of another manifest with a command, or of MindFormers."""
    value = document.value
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a mapping", f"name {manifest.TITLE} or a run_*.yaml of MindFormers")
    if "kind" in value and "spec" in value:
        return manifest.from_manifest(document, path)
    if path.suffix == ".toml":
        found = from_keys(document, torchtitan.KEYS, "torchtitan", torchtitan.TITLE, path)
        found.defaults = torchtitan.DEFAULTS
        return found
    if not {"parallel_config", "runner_config", "model", "base_config"} & value.keys():
        problem = f"{path}: neither {manifest.TITLE} nor a configuration of MindFormers"
        raise UsageError(problem, "a job has `kind` and `spec`; a run_*.yaml has `parallel_config`")
    found = from_keys(document, mindformers.KEYS, "mindformers", mindformers.TITLE, path)
    found.defaults = mindformers.DEFAULTS
    for name in value.get("base_config") or ():
        neighbour = path.parent / str(name)
        if not neighbour.is_file():
            found.notes.append(f"base_config names {name}, which does not exist: its keys are missing")
            continue
        base = from_keys(load_document(neighbour), mindformers.KEYS, "mindformers", "", neighbour)
        own = {given.name for given in found.given}
        found.given += [given for given in base.given if given.name not in own]
    return found


def from_keys(document: Document, table: str, family: str, title: str, path: Path) -> Found:
    """Return the options that a configuration's keys give; a section that the table names as a whole is one option."""
    if not isinstance(document.value, dict):
        raise UsageError(f"{path}: not a mapping", "is this the right file?")
    found = Found(family, title, path.name, name=re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:41].strip("-."))
    rows = options_by_name(table)

    def walk(value: object, keys: tuple[str, ...]) -> Iterator[Given]:
        name = ".".join(keys)
        option = rows.get(plain(name))
        deeper = isinstance(value, dict) and any(row.startswith(plain(name) + ".") for row in rows)
        if option is None and isinstance(value, dict) and value and (not keys or deeper):
            for key, inner in value.items():
                yield from walk(inner, (*keys, str(key)))
        elif isinstance(value, dict) and option is not None and deeper:
            for key, inner in value.items():
                part = rows.get(plain(f"{name}.{key}"))
                yield from walk(inner, (*keys, str(key))) if part else ()
            yield Given(name, (), document.where(keys), option)
        elif name:
            values = () if value is None else (value,)
            yield Given(name, values, document.where(keys).partition(" ")[0], option)

    found.given = list(walk(document.value, ()))
    return found
