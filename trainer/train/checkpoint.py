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

import json
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

from trainer.errors import CheckpointError, TrainingFailed
from trainer.files import sha256, sync

FORMAT = 1
MANIFEST = "manifest.json"
MODEL, OPTIMIZER, TOKENIZER = "model.safetensors", "optimizer.safetensors", "tokenizer.json"
NEEDED = {"step", "files", "config", "data", "consumed_samples", "optimizer_steps"}
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

    def tensors(self, name: str) -> dict[str, Tensor]:
        try:
            return load_file(str(self.path / name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / name}: {error}") from None


def verify(path: Path) -> Checkpoint:
    """The checkpoint in a folder, every file held to its size and hash; CheckpointError says what differs."""
    manifest = _read_manifest(path)
    for name, entry in manifest["files"].items():
        _verify_file(path / name, entry)
    return Checkpoint(path, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{file}: {error.strerror}", "a checkpoint is a folder with a manifest.json"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(f"{file}: format {found!r}; this program reads format {FORMAT}")
    names = manifest.get("files")
    sound = isinstance(names, dict) and MODEL in names and isinstance(manifest.get("step"), int)
    plain = isinstance(names, dict) and all(name == os.path.basename(name) for name in names)
    if not sound or not plain or not NEEDED.issubset(manifest):
        raise CheckpointError(f"{file}: its list of files, its step or another part is missing or wrong")
    return manifest


def _verify_file(file: Path, entry: Mapping[str, Any]) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    if size != entry["bytes"]:
        raise CheckpointError(f"{file}: has {size} bytes, the manifest says {entry['bytes']}")
    if sha256(file) != entry["sha256"]:
        raise CheckpointError(f"{file}: its content is not what was saved (sha256 differs)")


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
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    _need_room(folder, tensors)
    target = folder / f"step-{step:08d}"
    aside = folder / f".tmp-{target.name}-{os.getpid()}"
    aside.mkdir()
    try:
        for name, group in tensors.items():
            plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in group.items()}
            save_file(plain, str(aside / name))
        if tokenizer is not None:
            shutil.copyfile(tokenizer, aside / TOKENIZER)
        manifest = {"format": FORMAT, "step": step, **facts, "files": _describe(aside)}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in (*aside.iterdir(), aside):
            sync(path)
        _put_in_place(aside, target)
    except OSError as error:
        raise TrainingFailed(f"{target}: cannot be saved: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Checkpoint(target, manifest)


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


def _need_room(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    need = sum(
        tensor.numel() * tensor.element_size() for group in tensors.values() for tensor in group.values()
    )
    free = shutil.disk_usage(folder).free
    if free < need + (1 << 20):
        raise TrainingFailed(
            f"{folder}: a checkpoint needs {need / 1e6:.0f} MB, the disk has {free / 1e6:.0f} MB left",
            "make room, or lower train.save.keep",
        )


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
