"""Checkpoints: whole, verified folders, written aside and renamed.

    checkpoints/step-00000100/
        manifest.json            everything below, each file with its size and sha256; written last
        model.safetensors        parameters under logical names, vocabulary without padding
        optimizer.safetensors    exp_avg.<name>, exp_avg_sq.<name>, whole whatever the number of ranks
        tokenizer.json           where the config names one

No pickle: nothing in here is code. Dropout is seeded by (seed, step, rank), and the place in the data is the
number of samples consumed, so there is no random state to keep.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.checkpoint.disk import disk_failures
from trainer.checkpoint.header import read_header
from trainer.checkpoint.manifest import FORMAT, MANIFEST, check_file, encode_manifest, read_manifest
from trainer.errors import CheckpointError
from trainer.files import sha256, sync

MODEL, OPTIMIZER, TOKENIZER = "model.safetensors", "optimizer.safetensors", "tokenizer.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that verified."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.manifest["files"].values())

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a file, from its header alone."""
        return {key: entry.shape for key, entry in read_header(self.path / name).entries.items()}

    def tensors(self, name: str) -> dict[str, Tensor]:
        try:
            return load_file(str(self.path / name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / name}: {error}") from None


def verify(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder, after comparing every file with its size and hash."""
    manifest = read_manifest(path)
    if MODEL not in manifest["files"]:
        raise CheckpointError(f"{path / MANIFEST}: lists no {MODEL}")
    for name, entry in manifest["files"].items():
        _verify_file(path / name, entry)
    return Checkpoint(path, manifest)


def _verify_file(file: Path, entry: Mapping[str, Any]) -> None:
    try:
        size = check_file(file)
        if size != entry["bytes"]:
            raise CheckpointError(f"{file}: has {size} bytes, the manifest says {entry['bytes']}")
        if sha256(file) != entry["sha256"]:
            raise CheckpointError(f"{file}: its content is not what was saved (sha256 differs)")
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    if file.suffix == ".safetensors":
        read_header(file)


def found(folder: Path) -> list[Path]:
    """The checkpoints' folders below `folder`, newest first, verified or not."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and why each newer one was passed over."""
    skipped: list[str] = []
    for path in found(folder):
        try:
            return verify(path), skipped
        except CheckpointError as error:
            skipped.append(error.message)
    return None, skipped


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    facts: Mapping[str, Any],
    tokenizer: Path | None,
) -> Checkpoint:
    """Write `folder`/step-NNNNNNNN whole or not at all. `tensors`: file name -> tensors by name."""
    need = sum(
        tensor.numel() * tensor.element_size() for group in tensors.values() for tensor in group.values()
    )
    target = folder / f"step-{step:08d}"
    aside = folder / f".tmp-{target.name}-{os.getpid()}"
    try:
        with disk_failures(target, need):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
            if shutil.disk_usage(folder).free < need + (1 << 20):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            aside.mkdir()
            for name, group in tensors.items():
                _write_tensors(aside / name, group)
            if tokenizer is not None:
                shutil.copyfile(tokenizer, aside / TOKENIZER)
            manifest = {"format": FORMAT, "step": step, **facts, "files": _describe(aside)}
            (aside / MANIFEST).write_bytes(encode_manifest(manifest))
            for path in (*aside.iterdir(), aside):
                sync(path)
            _put_in_place(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Checkpoint(target, manifest)


def _write_tensors(file: Path, group: Mapping[str, Tensor]) -> None:
    """Write a safetensors file; the library's own error hides which fault the disk reported."""
    plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in group.items()}
    try:
        save_file(plain, str(file))
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code)) from None


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep`; nothing is removed unless one of those kept verifies."""
    paths = found(folder)
    kept, old = paths[:keep], paths[keep:]
    if not old or not any(_verifies(path) for path in kept):
        return []
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return old


def _verifies(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _describe(folder: Path) -> dict[str, dict[str, object]]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())
    }


def _put_in_place(aside: Path, target: Path) -> None:
    """Rename over `target`; one that is already there (saved before a resume) makes way first."""
    if target.exists():
        before = target.with_name(f".tmp-old-{target.name}-{os.getpid()}")
        os.rename(target, before)
        os.rename(aside, target)
        shutil.rmtree(before, ignore_errors=True)
    else:
        os.rename(aside, target)
    sync(target.parent)


def _remove_leftovers(folder: Path) -> None:
    """What a killed save left; the one writer of this folder is rank 0 of the live attempt."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
