"""The manifest of a checkpoint: a JSON object whose last entry is the SHA-256 of everything before that hash.

A changed bit anywhere in the file is noticed: in the part that is hashed, in the hash, or in the two characters that
follow it. Version 0.1 wrote manifests without a hash (format 1); they are still read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.names import HeldCheck
from trainer.errors import CheckpointError
from trainer.json_types import JsonObject

FORMAT = 2
OLD_FORMAT = 1
MANIFEST = "manifest.json"
# More than any real manifest: one of 1,536 ranks has 1 MB.
MOST_BYTES = 256 << 20
# How the names of the files with tensors end.
PARTS = ".safetensors"
# What a checkpoint holds: weights and the optimizer's moments, or weights alone.
STATES = ("all", "weights")
_KEY = b',\n"sha256": "'
_TAIL = re.compile(re.escape(_KEY) + rb'([0-9a-f]{64})"\n}\n\Z')
_HEX = re.compile(r"[0-9a-f]{64}")
# Entry of a manifest and the type of its value.
ENTRIES: dict[str, type] = {
    "step": int,
    "files": dict,
    "config": dict,
    "data": dict,
    "consumed_samples": int,
    "optimizer_steps": int,
}


def encode_manifest(manifest: Mapping[str, Any]) -> bytes:
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


def read_manifest(folder: Path) -> JsonObject:
    """Return the manifest of a checkpoint's folder; a CheckpointError names the file and what is wrong."""
    file = folder / MANIFEST
    check_access(folder)
    _check_above(folder)
    try:
        check_file(file)
        if file.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{file}: larger than {MOST_BYTES >> 20} MB, which no manifest is")
        content = file.read_bytes()
    except OSError as error:
        hint = "a checkpoint is a folder with a manifest.json"
        raise CheckpointError(f"{file}: {error.strerror}", hint) from None
    return decode_manifest(content, file)


def decode_manifest(content: bytes, file: Path) -> JsonObject:
    """Return the manifest in the bytes of `file`, with its hash and its entries checked."""
    tail = _TAIL.search(content)
    if tail and hashlib.sha256(content[: tail.start(1)]).hexdigest().encode() != tail[1]:
        raise CheckpointError(f"{file}: damaged: its content does not have the hash that it records")
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged: not JSON: {error}") from None
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file}: damaged: not a JSON object")
    _check_format(manifest.get("format"), tail is not None, file)
    wrong = [key for key, kind in ENTRIES.items() if type(manifest.get(key)) is not kind]
    wrong += [f"files[{name!r}]" for name, entry in _files(manifest) if not _is_sound_entry(name, entry)]
    wrong += [
        key for key in ("model", "optimizer") if not isinstance(_files_of(manifest, "config").get(key), dict)
    ]
    if manifest["format"] == FORMAT:
        wrong += _wrong_tensors(manifest)
    if wrong:
        raise CheckpointError(f"{file}: damaged: {', '.join(wrong[:5])} missing or of the wrong kind")
    return manifest


def _wrong_tensors(manifest: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the table of tensors, or with what a file is said to hold of them."""
    tensors = _files_of(manifest, "tensors")
    sound = bool(tensors) and all(_is_sound_tensor(entry) for entry in tensors.values())
    if not sound or manifest.get("state") not in STATES:
        return ["tensors or state"]
    check = HeldCheck([tuple(entry["shape"]) for entry in tensors.values()])
    parts = [(name, entry) for name, entry in _files(manifest) if name.endswith(PARTS)]
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


def _files_of(manifest: Mapping[str, Any], key: str) -> JsonObject:
    value = manifest.get(key)
    return value if isinstance(value, dict) else {}


def _files(manifest: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(_files_of(manifest, "files").items())


def _is_sound_entry(name: str, entry: object) -> bool:
    """Return whether `name` is a plain file name and its entry holds a size and a hash."""
    if not name or name != os.path.basename(name) or name in (".", "..", MANIFEST) or "\0" in name:
        return False
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
        return False
    return isinstance(entry.get("sha256"), str) and _HEX.fullmatch(entry["sha256"]) is not None


def check_access(folder: Path) -> None:
    """Refuse a folder that every user may change: its hashes would prove nothing."""
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    if mode & 0o002:
        problem = f"{folder}: every user of this machine can change what is in it"
        raise CheckpointError(problem, f"chmod o-w {folder}, if you trust what is there")


def _check_above(folder: Path) -> None:
    """Refuse a folder that every user may replace by another one."""
    above = folder.absolute().parent
    mode = above.stat().st_mode
    # In a folder such as /tmp users cannot replace what belongs to others.
    if mode & 0o002 and not mode & stat.S_ISVTX:
        problem = f"{above}: every user of this machine can replace what is in it"
        raise CheckpointError(problem, f"chmod o-w {above}, if you trust what is there")


def check_file(file: Path) -> int:
    """Return the size of a regular file; refuse links, which may lead out of the folder, and open permissions."""
    status = file.lstat()
    if not os.path.isfile(file) or os.path.islink(file):
        raise CheckpointError(f"{file}: not a regular file")
    if status.st_mode & 0o002:
        problem = f"{file}: every user of this machine can change it"
        raise CheckpointError(problem, f"chmod o-w {file}, if you trust what is there")
    return status.st_size
