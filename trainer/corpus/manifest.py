"""The manifest of a .bin/.idx pair: how it was built, and what its files contain."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.files import replace_file
from trainer.json_types import JsonObject


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of an input or an output."""

    bytes: int | None
    sha256: str


@dataclass(frozen=True)
class InputRecord:
    """A file that was read, with its size and hash."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that encoded the texts."""

    path: str
    sha256: str
    fingerprint: str = ""
    """The hash of what decides the ids of a text, the same for every form of its files; "" in older manifests."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known about a pair; None for what a split or merged pair does not have. Files keep this order of keys."""

    format: int = 1
    documents: int = 0
    empty_documents: int | None = None
    sequences: int = 0
    tokens: int = 0
    characters: int | None = None
    bytes: int | None = None
    token_type: str = ""
    unit: str = ""
    append_eod: bool = False
    vocab: int
    largest_id: int | None = None
    eod: int | None = None
    eod_token: str | None = None
    glm: dict[str, int] | None = None
    """GLM's special ids by name, if the tokenizer has all of them."""
    tokenizer: TokenizerRecord | None = None
    dropped: dict[str, int] | None = None
    """Documents that were left out, by reason."""
    bad: tuple[str, ...] = ()
    """The first lines that could not be read."""
    filters: dict[str, object] | None = None
    unigram_entropy_nats: float | None = None
    inputs: tuple[InputRecord, ...] = ()
    outputs: dict[str, FileRecord]
    """By ending: bin, idx."""
    split_from: str | None = None
    documents_from: tuple[int, ...] | None = None
    merged_from: tuple[str, ...] | None = None

    def as_json(self) -> JsonObject:
        return {key: value for key, value in asdict(self).items() if value is not None or key in _NULLABLE}


# Keys that are written even if their value is null.
_NULLABLE = ("eod", "eod_token", "glm")
_NUMBERS = ("format", "documents", "empty_documents", "sequences", "tokens", "characters", "bytes", "vocab")
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys((*_NUMBERS, "largest_id", "eod"), int),
    **dict.fromkeys(("token_type", "unit", "eod_token", "split_from"), str),
    **dict.fromkeys(("glm", "dropped", "filters"), dict),
    **dict.fromkeys(("bad", "documents_from", "merged_from"), list),
    "append_eod": bool,
    "unigram_entropy_nats": (int, float),
}


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".manifest.json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    replace_file(path, json.dumps(manifest.as_json(), indent=2, ensure_ascii=False).encode() + b"\n")


def load_manifest(path: Path) -> Manifest | None:
    """Return the manifest in a file, or None without one; raise ValueError for a file that is no manifest."""
    try:
        return _from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a manifest: {error}") from None


def _from_json(value: JsonObject) -> Manifest:
    """Return the manifest that a file holds; raise an error where it cannot be used."""
    given = {key: _checked(value[key], kind) for key, kind in _KINDS.items() if value.get(key) is not None}
    outputs = {ending: _file(entry) for ending, entry in value["outputs"].items()}
    if not outputs["bin"].sha256:
        raise ValueError("the hash of .bin is missing")
    recorded = value.get("tokenizer")
    tokenizer = recorded and TokenizerRecord(
        str(recorded.get("path", "")),
        _checked(recorded["sha256"], str),
        str(recorded.get("fingerprint", "")),
    )
    inputs = tuple(
        InputRecord(_checked(entry["path"], str), _checked(entry["bytes"], int), entry["sha256"])
        for entry in value.get("inputs") or ()
    )
    return Manifest(**given, outputs=outputs, tokenizer=tokenizer or None, inputs=inputs)


def _checked(value: Any, kind: Any) -> Any:
    """Return `value`, a list as a tuple; raise TypeError if it is not of `kind`. A bool does not count as a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.40} is not {kind}")
    return tuple(value) if isinstance(value, list) else value


def _file(entry: JsonObject) -> FileRecord:
    size, digest = entry.get("bytes"), entry.get("sha256")
    return FileRecord(size if isinstance(size, int) else None, digest if isinstance(digest, str) else "")
