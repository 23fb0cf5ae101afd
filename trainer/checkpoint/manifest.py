"""The manifest of a checkpoint: a JSON object whose last entry is the SHA-256 of everything before that hash.

A changed bit anywhere in the file is detected: in the part that is hashed, in the hash, or in the two characters that
follow it. Version 0.1 wrote manifests without a hash (format 1); they are still read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.access import check_above, check_access, check_file
from trainer.checkpoint.names import HeldCheck, Shape
from trainer.checkpoint.saved_file import SavedFile
from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig, read_section
from trainer.errors import CheckpointError, Fault
from trainer.json_types import JsonObject

FORMAT = 2
OLD_FORMAT = 1
MANIFEST = "manifest.json"
# Limit of bytes of a manifest; one of 1,536 ranks has 1 MB.
MOST_BYTES = 256 << 20
# Suffix of the names of files with tensors.
PARTS = ".safetensors"
# The content of a checkpoint: weights and the optimizer's moments, or only weights.
STATES = ("all", "weights")
_KEY = b',\n"sha256": "'
_TAIL = re.compile(re.escape(_KEY) + rb'([0-9a-f]{64})"\n}\n\Z')
_HEX = re.compile(r"[0-9a-f]{64}")
_NUMBER = (int, float)
# Entries that every manifest has, and the type of their values.
ENTRIES: dict[str, type] = {
    "step": int,
    "files": dict,
    "config": dict,
    "data": dict,
    "consumed_samples": int,
    "optimizer_steps": int,
}
# Entries that may be missing or null.
OPTIONAL: dict[str, tuple[type, ...]] = {
    "tokens": (int,),
    "loss": _NUMBER,
    "eval_loss": _NUMBER,
    "accuracy": _NUMBER,
    "loss_scale": (dict,),
    "base": (dict,),
    "origin": (dict,),
}


@dataclass(frozen=True)
class BaseWeights:
    """The weights to which adapters are added: their folder, and a hash that identifies them."""

    source: str
    fingerprint: str


@dataclass(frozen=True)
class Origin:
    """The source of imported weights."""

    format: str
    path: str
    facts: Mapping[str, object] = field(default_factory=dict)
    """Further records of the format, for people to read."""
    family: str = ""
    """The family of a model of Hugging Face."""
    before: Origin | None = None
    """The earlier origin, if the source was an imported checkpoint."""

    def as_json(self) -> dict[str, object]:
        document: dict[str, object] = {"format": self.format, "path": self.path}
        document |= {"family": self.family} if self.family else {}
        before = {"origin": self.before.as_json()} if self.before else {}
        return {**document, **self.facts, **before}

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Origin:
        known = {key: str(given.get(key, "")) for key in ("format", "path", "family")}
        facts = {key: value for key, value in given.items() if key not in (*known, "origin")}
        before = given.get("origin")
        return cls(facts=facts, before=cls.read(before) if isinstance(before, dict) else None, **known)


@dataclass(frozen=True)
class Manifest:
    """The values that a checkpoint records about itself."""

    step: int
    config: TrainConfig
    """The config of the training; missing or wrong keys have their defaults."""
    tensors: Mapping[str, Shape] = field(default_factory=dict)
    """The shape of each logical tensor; format 1 has no table of them."""
    files: Mapping[str, SavedFile] = field(default_factory=dict)
    state: str = "all"
    """One of STATES."""
    optimizer_steps: int = 0
    consumed_samples: int = 0
    tokens: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    accuracy: float | None = None
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    data: DataIdentity = field(default_factory=DataIdentity)
    base: BaseWeights | None = None
    """Only in a checkpoint of adapters."""
    origin: Origin | None = None
    """Only for imported weights."""
    about: Mapping[str, object] = field(default_factory=dict)
    """Entries that are only shown: the layout of the ranks, versions, times."""
    format: int = FORMAT
    faults: tuple[Fault, ...] = ()
    """The faults of `config`."""

    def as_json(self) -> dict[str, object]:
        return {
            "format": self.format,
            "step": self.step,
            "state": self.state,
            "optimizer_steps": self.optimizer_steps,
            "consumed_samples": self.consumed_samples,
            "tokens": self.tokens,
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "accuracy": self.accuracy,
            "loss_scale": dict(self.loss_scale),
            "config": self.config.as_json(),
            "data": self.data.as_json(),
            **({"base": asdict(self.base)} if self.base else {}),
            **({"origin": self.origin.as_json()} if self.origin else {}),
            **self.about,
            "tensors": {key: {"dtype": "F32", "shape": list(shape)} for key, shape in self.tensors.items()},
            "files": {name: entry.as_json() for name, entry in self.files.items()},
        }


def encode_manifest(manifest: Mapping[str, object]) -> bytes:
    """Return the bytes of a manifest file, one top-level entry or file on each line."""
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in manifest.items()]
    content = ("{\n" + ",\n".join(lines)).encode() + _KEY
    return content + hashlib.sha256(content).hexdigest().encode() + b'"\n}\n'


def _lines(value: object) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return (
        "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "}"
    )


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder; a CheckpointError names the file and the fault."""
    file = folder / MANIFEST
    try:
        folder.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no such folder", "check the path") from None
    except OSError:
        # The read below reports it.
        pass
    check_access(folder)
    check_above(folder)
    try:
        check_file(file)
        if file.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{file}: larger than {MOST_BYTES >> 20} MB, which no manifest is")
        content = file.read_bytes()
    except OSError as error:
        hint = (
            "name a folder with a manifest.json; `clusterctl checkpoint import` makes it of another program's"
        )
        raise CheckpointError(f"{file}: {error.strerror}", hint) from None
    return decode_manifest(content, file)


def decode_manifest(content: bytes, file: Path) -> Manifest:
    """Return the manifest in the bytes of `file`, with its hash and its entries checked."""
    tail = _TAIL.search(content)
    if tail and hashlib.sha256(content[: tail.start(1)]).hexdigest().encode() != tail[1]:
        raise CheckpointError(f"{file}: damaged: its content does not have the hash that it records")
    try:
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged: not JSON: {error}") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"{file}: damaged: not a JSON object")
    _check_format(given.get("format"), tail is not None, file)
    wrong = _wrong_entries(given)
    if given["format"] == FORMAT and not wrong:
        wrong = _wrong_tensors(given)
    if wrong:
        raise CheckpointError(f"{file}: damaged: {', '.join(wrong[:5])} missing or of the wrong kind")
    return _manifest(given)


def _manifest(given: JsonObject) -> Manifest:
    """Return the record of a manifest whose entries are checked."""
    faults: list[Fault] = []
    config = read_section(TrainConfig, given["config"], "config", faults)
    files = {
        name: SavedFile(entry["bytes"], entry["sha256"], entry.get("holds"))
        for name, entry in given["files"].items()
    }
    tensors = given["tensors"] if given["format"] == FORMAT else {}
    base, origin = given.get("base"), given.get("origin")
    return Manifest(
        given["step"],
        config,
        {key: tuple(entry["shape"]) for key, entry in tensors.items()},
        files,
        given.get("state", "all"),
        given["optimizer_steps"],
        given["consumed_samples"],
        given.get("tokens"),
        given.get("loss"),
        given.get("eval_loss"),
        given.get("accuracy"),
        given.get("loss_scale") or {},
        DataIdentity.read(given["data"]),
        BaseWeights(base["source"], base["fingerprint"]) if base else None,
        Origin.read(origin) if origin else None,
        format=given["format"],
        faults=tuple(faults),
    )


def _wrong_entries(given: JsonObject) -> list[str]:
    """Return the names of entries that are missing or of the wrong kind; tensors are checked separately."""
    wrong = [key for key, kind in ENTRIES.items() if type(given.get(key)) is not kind]
    wrong += [
        key for key, kinds in OPTIONAL.items() if given.get(key) is not None and type(given[key]) not in kinds
    ]
    wrong += [f"files[{name!r}]" for name, entry in _files(given) if not _is_sound_entry(name, entry)]
    wrong += [
        key for key in ("model", "optimizer") if not isinstance(_object(given, "config").get(key), dict)
    ]
    wrong += ["loss_scale"] * any(
        type(value) not in _NUMBER for value in _object(given, "loss_scale").values()
    )
    wrong += ["state"] * (given.get("state", "all") not in STATES)
    base = _object(given, "base")
    wrong += ["base"] * any(type(base.get(key)) is not str for key in ("source", "fingerprint") if base)
    return wrong


def _wrong_tensors(given: JsonObject) -> list[str]:
    """Return the fault of the table of tensors, or of the boxes of a file."""
    tensors = _object(given, "tensors")
    sound = bool(tensors) and all(_is_sound_tensor(entry) for entry in tensors.values())
    if not sound or "state" not in given:
        return ["tensors or state"]
    check = HeldCheck([tuple(entry["shape"]) for entry in tensors.values()])
    parts = [(name, entry) for name, entry in _files(given) if name.endswith(PARTS)]
    return [f"files[{name!r}].holds" for name, entry in parts if not check.is_sound(entry.get("holds"))]


def _is_sound_tensor(entry: Any) -> bool:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size > 0 for size in shape)


def _check_format(number: object, hashed: bool, file: Path) -> None:
    if type(number) is int and number > FORMAT and hashed:
        problem = f"{file}: written in format {number} by a newer version; this one reads up to {FORMAT}"
        raise CheckpointError(problem, "update clusterctl")
    if number != (FORMAT if hashed else OLD_FORMAT) or type(number) is not int:
        raise CheckpointError(f"{file}: damaged: format {number!r} {'with' if hashed else 'without'} a hash")


def _object(given: JsonObject, key: str) -> JsonObject:
    value = given.get(key)
    return value if isinstance(value, dict) else {}


def _files(given: JsonObject) -> list[tuple[str, Any]]:
    return list(_object(given, "files").items())


def _is_sound_entry(name: str, entry: object) -> bool:
    """Return whether `name` is a plain file name and its entry has a size and a hash."""
    if not name or name != os.path.basename(name) or name in (".", "..", MANIFEST) or "\0" in name:
        return False
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
        return False
    return isinstance(entry.get("sha256"), str) and _HEX.fullmatch(entry["sha256"]) is not None
