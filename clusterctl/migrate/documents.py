"""Read configuration files: MindFormers' and DeepSpeed's keys, and manifests of Kubernetes with a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from clusterctl.bash.evaluate import evaluate
from clusterctl.bash.evaluator import Word
from clusterctl.document import Document, load_document
from clusterctl.errors import UsageError
from clusterctl.migrate.families import KNOWN
from clusterctl.migrate.found import Found, Given
from clusterctl.migrate.option import options_by_name, plain
from clusterctl.migrate.start import parse, start
from clusterctl.migrate.tables import manifest, mindformers, torchtitan


def from_document(document: Document, path: Path) -> Found:
    """Return the training of a DeepSpeed job, of another manifest with a command, or of MindFormers."""
    value = document.value
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a mapping", "name a job of Kubernetes or a run_*.yaml of MindFormers")
    if "kind" in value and "spec" in value:
        return _from_manifest(document, path)
    if path.suffix == ".toml":
        found = from_keys(document, torchtitan.KEYS, "torchtitan", torchtitan.TITLE, path)
        found.defaults = torchtitan.DEFAULTS
        return found
    if not {"parallel_config", "runner_config", "model", "base_config"} & value.keys():
        problem = f"{path}: neither a job of Kubernetes nor a configuration of MindFormers"
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


def _from_manifest(document: Document, path: Path) -> Found:
    """Return the training in a manifest: the command of a known program, and the numbers of nodes and devices."""
    for words in _placed(document, path):
        begin = start(words)
        if begin is None:
            continue
        found = parse(begin[0], words, begin[1], path.name, path)
        found.name = str((document.value.get("metadata") or {}).get("name") or path.stem)[:41]
        found.given += [*_manifest_facts(document), *_claims(document)]
        return found
    lists = [words for keys, words in _commands_in(document.value, ()) if {"command", "args"} & set(keys)]
    started = "; ".join(" ".join(words) for words in lists)[:120]
    problem = f"{path}: no container starts a known program" + (f", only: {started}" if started else "")
    raise UsageError(problem, f"known programs: {KNOWN}")


def _claims(document: Document) -> Iterator[Given]:
    """Yield the volume claims of a manifest with the folders where they are mounted, and the working folder."""
    found: dict[str, list[tuple[str, str]]] = {"mountPath": [], "claimName": []}
    folders = [""]

    def walk(value: object) -> None:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, dict):
            claim = value.get("persistentVolumeClaim")
            for key, text in (*value.items(), *(claim.items() if isinstance(claim, dict) else ())):
                if key in found and "name" in value:
                    found[key].append((str(value["name"]), str(text)))
            folders[0] = str(value.get("workingDir") or folders[0])
        for each in inner:
            walk(each)

    walk(document.value)
    mounts = dict(found["mountPath"])
    claims = {claim: mounts[name].rstrip("/") for name, claim in found["claimName"] if name in mounts}
    if claims:
        where = document.where(()).partition(" ")[0]
        option = options_by_name(manifest.KEYS)["claims"]
        yield Given("claimName", ({"claims": claims, "folder": folders[0]},), where, option)


def _commands_in(value: object, keys: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], list[str]]]:
    """Yield each list of words in a manifest, and the words of each command in a text, such as that of `sh -c`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _commands_in(inner, (*keys, key))
    elif isinstance(value, list):
        if value and all(isinstance(each, (str, int, float)) for each in value):
            yield keys, [str(each) for each in value]
        for at, inner in enumerate(value):
            yield from _commands_in(inner, (*keys, at))
            if isinstance(inner, str) and len(inner.split()) > 3:
                for command in evaluate(inner, "the manifest").commands:
                    yield keys, [word.text for word in command.words]


def _placed(document: Document, path: Path) -> Iterator[list[Word]]:
    """Yield each command of a manifest as words with their lines in the file."""
    for keys, texts in _commands_in(document.value, ()):
        lines = [document.lines.get((*keys, at), document.lines.get(keys, 1)) for at in range(len(texts))]  # type: ignore[arg-type]
        yield [Word(text, f"{path}:{line}") for text, line in zip(texts, lines, strict=True)]


def _manifest_facts(document: Document) -> Iterator[Given]:
    """Yield the numbers of nodes and devices that a manifest requests, and its other keys that the table names."""
    rows = options_by_name(manifest.KEYS)

    def walk(value: object, keys: tuple[str | int, ...]) -> Iterator[Given]:
        if isinstance(value, list):
            for at, inner in enumerate(value):
                yield from walk(inner, (*keys, at))
        if not isinstance(value, dict):
            return
        for key, inner in value.items():
            place = (*keys, key)
            option = rows.get(plain(str(key)))
            # Requests repeat the limits.
            if option is not None and not isinstance(inner, (dict, list)) and "requests" not in keys:
                where = document.where(place).partition(" ")[0]
                if option.kind != "int" or str(inner).isdigit():
                    yield Given(str(key), (inner,), where, option)
            else:
                yield from walk(inner, place)

    yield from walk(document.value, ())
