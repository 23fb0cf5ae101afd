"""Find the initial weights of a training, in any known format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire.contract import CHECKPOINT_DIR
from clusterctl.wire.requests import ImportRequest
from clusterctl.wire.saved import MANIFEST
from trainer.checkpoint.store import Checkpoint, check_size, found, open_checkpoint
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError
from trainer.side_files import TOKENIZER
from trainer.weights.contents import Contents
from trainer.weights.convert import FORMATS, detected


@dataclass(frozen=True)
class Source:
    """A model's weights: our checkpoint in `folder`, or the `contents` of another program's checkpoint."""

    folder: Path
    model: ModelConfig
    tokenizer: Path | None = None
    contents: Contents | None = None


@dataclass(frozen=True)
class Incomplete:
    """A checkpoint of ours that lacks files on this machine."""

    folder: Path
    missing: tuple[str, ...]
    """The files that are absent or of another size than was saved."""
    count: int
    """The number of all its files."""


def checkpoints_in(path: Path) -> Path | None:
    """Return the folder of a run's checkpoints if `path` is a run's folder or that folder itself, else None."""
    return next((folder for folder in (path / CHECKPOINT_DIR, path) if found(folder)), None)


def weights_folder(path: Path) -> Path:
    """Return the folder of the weights at a path: of a run, its newest checkpoint."""
    folder = checkpoints_in(path)
    return path if folder is None else found(folder)[0]


def open_source(path: Path, heads: int = 0) -> Source:
    """Return the weights at a path, without reading tensors; `heads`: for formats that do not record the heads."""
    own = weights_folder(path)
    if (own / MANIFEST).is_file():
        checkpoint = open_checkpoint(own)
        return Source(own, checkpoint.model, own / TOKENIZER if TOKENIZER in checkpoint.files else None)
    read = FORMATS[detected(path)].read
    if read is None:
        raise CheckpointError(f"{path}: weights in this format cannot be read")
    contents = read(path, ImportRequest(heads=heads))
    tokenizer = path / TOKENIZER if path.is_dir() else None
    return Source(path, contents.model, tokenizer if tokenizer and tokenizer.is_file() else None, contents)


def incomplete_source(path: Path) -> Incomplete | None:
    """Return the newest checkpoint at a path if none there has all files; None also for another program's weights."""
    folder = checkpoints_in(path)
    newest = None
    for own in [path] if folder is None else found(folder):
        if not (own / MANIFEST).is_file():
            continue
        checkpoint = open_checkpoint(own)
        missing = tuple(name for name in checkpoint.files if not _is_whole(checkpoint, name))
        if not missing:
            return None
        newest = newest or Incomplete(own, missing, len(checkpoint.files))
    return newest


def _is_whole(checkpoint: Checkpoint, name: str) -> bool:
    try:
        check_size(checkpoint, name)
    except CheckpointError:
        return False
    return True
