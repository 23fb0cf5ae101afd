"""Decide which checkpoints are kept: those of the config, and those that are being read or copied.

A process that reads a checkpoint holds a lock on its manifest, for the other processes of the node. It also keeps a
fresh file `.in-use.TOKEN` in the folder, for other nodes with the same disk, and for programs that copy the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterctl.wire.saved import FRESH, IN_USE, MANIFEST, OLD, RENEWED, UNFINISHED
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.store import found
from trainer.config.parts import KeepConfig
from trainer.errors import CheckpointError


@contextmanager
def in_use(path: Path, mark: bool = True) -> Iterator[None]:
    """Keep a checkpoint from being removed while it is read; with `mark`, also by other nodes and programs."""
    try:
        handle = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        with _marked(path) if mark else contextlib.nullcontext():
            yield
    finally:
        os.close(handle)


@contextmanager
def _marked(path: Path) -> Iterator[None]:
    file, over = path / f"{IN_USE}{uuid.uuid4().hex[:12]}", threading.Event()
    try:
        file.touch()
    except OSError:
        # A user who may only read a folder cannot remove it either.
        yield
        return
    renewal = threading.Thread(target=_renew, args=(file, over), daemon=True, name="mark checkpoint")
    renewal.start()
    try:
        yield
    finally:
        over.set()
        renewal.join()
        file.unlink(missing_ok=True)


def _renew(file: Path, over: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not over.wait(RENEWED):
            os.utime(file)


def is_marked(path: Path) -> bool:
    """Return whether a program reads or copies this checkpoint now."""
    for file in path.glob(f"{IN_USE}*"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime < FRESH:
                return True
    return False


def prune(folder: Path, keep: KeepConfig, complete: str) -> list[Path]:
    """Remove the checkpoints that `keep` does not name; never `complete`, nor one that is being read.

    `complete`: the name of one that was just confirmed by all nodes.
    """
    every = found(folder)
    paths = [path for path in every if OLD not in path.name]
    names = {complete, *(path.name for path in paths[: keep.last])}
    steps = {path: int(path.name.rpartition("-")[2]) for path in paths}
    names |= {path.name for path, step in steps.items() if keep.every and step % keep.every == 0}
    if keep.best:
        ranks = {path: rank for path in paths if (rank := _rank(path)) is not None}
        names |= {path.name for path in sorted(ranks, key=lambda path: ranks[path])[: keep.best]}
    old = [path for path in every if path.name.partition(OLD)[0] not in names]
    return [path for path in old if _remove_unused(path)]


def _rank(path: Path) -> tuple[float, float] | None:
    """Return the sort key that puts the best checkpoint first: by accuracy if the task has one, then by loss."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None
    loss, accuracy = manifest.eval_loss, manifest.accuracy
    if loss is None:
        return None
    if manifest.config.tune.task == "chat" or accuracy is None:
        return 0.0, loss
    return -accuracy, loss


def _remove_unused(path: Path) -> bool:
    """Remove a checkpoint; return whether it is gone."""
    if is_marked(path):
        return False
    try:
        handle = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Rename it first: a reader must not choose a checkpoint that is half removed.
        gone = path.with_name(f"{UNFINISHED}{path.name}-removed")
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def remove_old(target: Path) -> None:
    """Remove older checkpoints of a step that is now complete on all nodes."""
    for path in target.parent.glob(f"{target.name}{OLD}*"):
        _remove_unused(path)


def remove_unfinished(folder: Path) -> None:
    """Remove the files that a killed save left; no other save may be in progress in this folder."""
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
