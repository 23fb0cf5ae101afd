"""The manifest of a checkpoint: a JSON object whose last entry is the SHA-256 of everything before that hash.

A changed bit anywhere in the file is detected: in the part that is hashed, in the hash, or in the two characters that
follow it. Version 0.1 wrote manifests without a hash (format 1); they are still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clusterctl.wire import saved
from clusterctl.wire.saved import FORMAT, MANIFEST, PARTS, SavedFile
from trainer.checkpoint.access import check_access, refusing
from trainer.checkpoint.names import HeldCheck, Shape
from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig, read_section
from trainer.errors import CheckpointError, Fault
from trainer.json_types import JsonObject

# The content of a checkpoint: weights and the optimizer's moments, or only weights.
STATES = ("all", "weights")
_NUMBER = (int, float)
# Entries that every manifest has, and the type of their values.
ENTRIES: dict[str, type] = {
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
    try:
        with refusing():
            saved.check_above(str(folder))
            content = saved.manifest_content(str(file))
    except OSError as error:
        hint = (
            "name a folder with a manifest.json; `clusterctl checkpoint import` makes it of another program's"
        )
        raise CheckpointError(f"{file}: {error.strerror}", hint) from None
    return decode_manifest(content, file)


def decode_manifest(content: bytes, file: Path) -> Manifest:
    """Return the manifest in the bytes of `file`, with its hash and its entries checked."""
    with refusing():
        given = saved.manifest_object(content, str(file))
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
    files = saved.files_of(given["files"])
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
    if not tensors or "state" not in given:
        return ["tensors or state"]
    check = HeldCheck([tuple(entry["shape"]) for entry in tensors.values()])
    parts = [(name, entry) for name, entry in _files(given) if name.endswith(PARTS)]
    return [f"files[{name!r}].holds" for name, entry in parts if not check.is_sound(entry.get("holds"))]


def _object(given: JsonObject, key: str) -> JsonObject:
    value = given.get(key)
    return value if isinstance(value, dict) else {}


def _files(given: JsonObject) -> list[tuple[str, Any]]:
    return list(_object(given, "files").items())
