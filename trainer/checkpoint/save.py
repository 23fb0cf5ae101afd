"""One save: every rank writes its own file, rank 0 collects their hashes, and each node publishes the same manifest.

The ranks coordinate through the board, so that no collective waits for a disk. The order on each node is: files and
their fsync, reading them back, manifest, one rename. `latest` names a checkpoint only after all nodes have renamed it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clusterctl.wire.saved import MANIFEST, PARTS, UNFINISHED, SavedFile, encode_manifest
from trainer.checkpoint.board import Board
from trainer.checkpoint.disk import disk_failures
from trainer.checkpoint.folders import Folder
from trainer.checkpoint.keep import prune, remove_old
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.part import Part
from trainer.checkpoint.read import VerifiedFile
from trainer.checkpoint.store import (
    UNCONFIRMED,
    check_size,
    folder_of,
    open_checkpoint,
    publish,
    verify_file,
    write_latest,
)
from trainer.checkpoint.write import PIECE, write_parts
from trainer.config.parts import KeepConfig
from trainer.errors import CheckpointError, TrainerError, TrainingFailed
from trainer.files import sha256, sync
from trainer.side_files import TOKENIZER

DISK_FAULT = (
    "the disk does not return what was written to it: look at `dmesg` on this node, and use another disk"
)


@dataclass(frozen=True)
class SaveOrder:
    """The description of one save, the same on every rank."""

    manifest: Manifest
    """The manifest without files."""
    token: str
    """Identifies this save."""
    keep: KeepConfig
    texts: Mapping[str, Path] = field(default_factory=dict)
    """The tokenizer, and files that belong to it, by their names in the checkpoint: its config and chat template."""
    read_back: bool = True
    """Read every file from the disk and compare its hashes before the checkpoint is published."""


def save_parts(order: SaveOrder, parts: Sequence[Part], folder: Folder, board: Board, nice: int = 0) -> int:
    """Save a step together with the other ranks; return the bytes of all files, once all nodes have them.

    Raise TrainingFailed on every rank if one of them could not write.
    """
    began = time.monotonic()
    rank, key = board.rank, f"save-{order.token}"
    target = folder_of(folder.path, order.manifest.step)
    aside = folder.path / f"{UNFINISHED}{target.name}-{order.token}"
    try:
        written = _attempt(board, lambda: _write(order, parts, aside, target, rank, nice))
        board.post(f"{key}/part/{rank}", written)
        if rank == 0:
            board.post(f"{key}/manifest", collect_manifest(order, board, key, began))
        if folder.is_leader:
            (manifest,) = board.take([f"{key}/manifest"])
            done = _attempt(board, lambda: publish_manifest(manifest, order, aside, target))
            board.post(f"{key}/published/{rank}", done)
        if rank == 0:
            board.post(f"{key}/done", _confirmed(board, key, folder))
        (done,) = board.take([f"{key}/done"])
        if "error" in done:
            raise TrainingFailed(done["error"], done["hint"])
        if folder.is_leader:
            with disk_failures(target):
                write_latest(folder.path, target.name)
                (target / UNCONFIRMED).unlink(missing_ok=True)
            remove_old(target)
            prune(folder.path, order.keep, target.name)
        return int(done["bytes"])
    finally:
        if folder.is_leader:
            shutil.rmtree(aside, ignore_errors=True)


def _confirmed(board: Board, key: str, folder: Folder) -> dict[str, object]:
    """Return the size of all files once every node has published them, or the first failure."""
    keys = [f"{key}/published/{leader}" for leader in folder.all_leaders]
    published = board.take(keys)
    board.stale = [*keys, f"{key}/manifest", f"{key}/done"]
    return next((dict(entry) for entry in published if "error" in entry), dict(published[0]))


def _attempt(board: Board, work: Any) -> dict[str, object]:
    """Return the result of `work`, or a description of its failure, and of this rank, for the other ranks."""
    try:
        result: dict[str, object] = work()
    except TrainerError as error:
        message, hint = error.message, error.hint
        if isinstance(error, CheckpointError):
            # The bytes on the disk differ from those written.
            message, hint = f"not saved: {message}", DISK_FAULT
        return {"error": f"{board.writer}: {message}", "hint": hint}
    return result


def _write(
    order: SaveOrder, parts: Sequence[Part], aside: Path, target: Path, rank: int, nice: int
) -> dict[str, object]:
    """Write this rank's file; return its entry of the manifest, or {} if the rank owns no part."""
    need = sum(part.tensor.numel() * part.tensor.element_size() for part in parts)
    with disk_failures(target, need):
        aside.mkdir(parents=True, exist_ok=True)
        if rank == 0 and TOKENIZER in order.texts:
            # Leaders of other folders copy it when they publish.
            order.texts[TOKENIZER].stat()
        if not parts:
            return {}
        name = f"part-{rank:05d}{PARTS}"
        written = write_parts(aside / name, parts, order.manifest.tensors, nice)
        check_written(aside / name, written, order.read_back)
        return {name: written.as_json()}


def collect_manifest(order: SaveOrder, board: Board, key: str, began: float) -> dict[str, object]:
    """Return the manifest of all ranks' files, or the first failure."""
    keys = [f"{key}/part/{rank}" for rank in range(board.world)]
    entries = board.take(keys)
    board.remove([*keys, *board.stale])
    files: dict[str, object] = {}
    for entry in entries:
        if "error" in entry:
            return dict(entry)
        files |= entry
    for name, file in order.texts.items():
        described = _attempt(board, partial(_describe, file))
        if "error" in described:
            return described
        files[name] = described
    about = {**order.manifest.about, "save_seconds": time.monotonic() - began}
    return {**replace(order.manifest, about=about).as_json(), "files": files}


def check_written(file: Path, written: SavedFile, read_back: bool) -> None:
    """Compare size and header of a file on the disk with those written, with `read_back` all its bytes.

    A CheckpointError names the difference.
    """
    # A file that is not read back stays in the page cache, so that a load soon after the save reads it from memory.
    drop_cached(file, 0 if read_back else PIECE)
    with VerifiedFile(file, written.sha256) as stream:
        if stream.size != written.bytes:
            raise CheckpointError(f"{file}: has {stream.size} bytes, and {written.bytes} were written")
        if read_back:
            stream.verify()


def drop_cached(file: Path, size: int = 0) -> None:
    """Remove a synced file from the page cache, where the system can, so that the next read comes from the disk.

    `size`: only so many bytes at its beginning; 0 for all.
    """
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _describe(file: Path) -> dict[str, object]:
    with disk_failures(file):
        return SavedFile(file.stat().st_size, sha256(file)).as_json()


def publish_manifest(
    manifest: Mapping[str, object], order: SaveOrder, aside: Path, target: Path
) -> dict[str, object]:
    """Complete this node's folder and rename it; if another rank failed, return its failure."""
    if "error" in manifest:
        return dict(manifest)
    with disk_failures(target):
        for name, source in order.texts.items():
            shutil.copyfile(source, aside / name)
        (aside / MANIFEST).write_bytes(encode_manifest(manifest))
        for file in (aside / MANIFEST, *(aside / name for name in order.texts)):
            sync(file)
            drop_cached(file)
        written = open_checkpoint(aside)
        for name in (path.name for path in aside.iterdir() if path.name != MANIFEST):
            check_size(written, name)
            if name in order.texts:
                verify_file(written, name)
        (aside / UNCONFIRMED).touch()
        publish(aside, target)
    return {"bytes": written.bytes}
