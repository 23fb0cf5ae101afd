"""A training's folder of checkpoints: open, verify and publish them.

    checkpoints/latest                     the name of the newest one that is complete on all nodes
    checkpoints/step-00000100/
        manifest.json                      config, data, layout; all tensors; each file with its size and hash
        part-00000.safetensors             what rank 0 saved, under logical names
        part-00001.safetensors             ...
        tokenizer.json                     where the config names one; with its config and chat template, if it has some

Nothing in here is code, as pickle would be. Dropout is seeded by (seed, step, rank), and the place in the data is the
number of samples consumed, so that there is no random state to save. Without a shared disk each node has the files of
its own ranks, and the same manifest.

Version 0.1 wrote one whole file of weights and one of moments (format 1); these checkpoints load too.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from clusterctl.wire.saved import LATEST, OLD, OLD_FILES, OLD_FORMAT, PARTS, SavedFile
from trainer.checkpoint.access import check_file, read_header
from trainer.checkpoint.manifest import Manifest, read_manifest
from trainer.checkpoint.names import Shape, boxes_held, meet, name_in_file
from trainer.checkpoint.part import MOMENTS, Box, Part, intersection, volume, whole_box
from trainer.checkpoint.read import VerifiedFile, read_parts, tensors_to_fill
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError
from trainer.files import replace_file, sha256, sync

# A file in a checkpoint's folder from its publication on one node until all nodes have published it.
UNCONFIRMED = ".unconfirmed"
# More threads do not read faster, because all ranks of a node read its disks at the same time.
MOST_THREADS = 8
_NAME = re.compile(rf"(step-(\d{{8,}}))({re.escape(OLD)}\d*)?")


@dataclass(frozen=True)
class Checkpoint:
    """The manifest of a checkpoint and where its files are; some of them may be on other nodes."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def model(self) -> ModelConfig:
        """Return the config of the model; raise a CheckpointError if the manifest's is wrong."""
        if fault := next(
            (fault for fault in self.manifest.faults if fault.key.startswith("config.model")), None
        ):
            raise CheckpointError(f"{self.path}: {fault}")
        return self.manifest.config.model

    @property
    def files(self) -> Mapping[str, SavedFile]:
        """Return the manifest's entry of each file."""
        return self.manifest.files

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def is_old(self) -> bool:
        return self.manifest.format == OLD_FORMAT

    @cached_property
    def table(self) -> dict[str, Shape]:
        """Return the shape of each logical tensor."""
        if self.is_old:
            return {key: shape for key, (_, shape) in self._old_tensors.items()}
        return dict(self.manifest.tensors)

    def pieces_for(self, parts: Sequence[Part]) -> dict[str, list[tuple[str, Box]]]:
        """Return for the tensor of each part the files that contain boxes of it, with these boxes."""
        if self.is_old:
            return {key: [(file, whole_box(shape))] for key, (file, shape) in self._old_tensors.items()}
        keys, found = list(self.table), {part.key: list[tuple[str, Box]]() for part in parts}
        wanted = {part.box for part in parts}
        for name, entry in self.files.items():
            for group in entry.holds or () if name.endswith(PARTS) else ():
                # Most files of a large training contain no box that this rank needs.
                if any(meet(box, group[0]) for box in wanted):
                    for key, box in boxes_held([group], keys):
                        if key in found:
                            found[key].append((name, box))
        return found

    def files_for(self, parts: Sequence[Part]) -> list[str]:
        """Return the files that a rank reads to fill these parts."""
        if self.is_old:
            return [name for name in OLD_FILES if name in self.files]
        pieces = self.pieces_for(parts)
        needed = {
            name
            for part in parts
            for name, box in pieces[part.key]
            if intersection(part.box, box) is not None
        }
        return sorted(needed)

    def fill(self, parts: Sequence[Part]) -> None:
        """Write the saved numbers into every part, verified while they are read."""
        threads = min(torch.get_num_threads(), MOST_THREADS)
        read_parts(self.path, parts, self.pieces_for(parts), self.digests, threads)

    @cached_property
    def _old_tensors(self) -> dict[str, tuple[str, Shape]]:
        return {
            key: (file, entry.shape)
            for file in OLD_FILES
            if file in self.files
            for key, entry in read_header(self.path / file).entries.items()
        }

    @property
    def digests(self) -> dict[str, str | None]:
        """Return the hash of each file's header; None for files of version 0.1, which have a hash of the complete
        file.
        """
        return {name: None if self.is_old else entry.sha256 for name, entry in self.files.items()}

    @property
    def weights(self) -> dict[str, Shape]:
        """Return the shape of each parameter."""
        return {key: shape for key, shape in self.table.items() if not key.startswith(MOMENTS)}

    def read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return whole logical tensors, verified while they are read."""
        tensors, parts = tensors_to_fill(self.table, keys)
        self.fill(parts)
        return tensors


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder; only its manifest is verified."""
    return Checkpoint(path, read_manifest(path))


def verify(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder, after comparing every byte of its files with their hashes."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.files:
        verify_file(checkpoint, name)
    _, parts = tensors_to_fill(checkpoint.table, list(checkpoint.table), device="meta")
    pieces = checkpoint.pieces_for(parts)
    held = {key: sum(volume(box) for _, box in pieces[key]) for key in checkpoint.table}
    short = [key for key, shape in checkpoint.table.items() if held[key] != volume(whole_box(shape))]
    if short:
        raise CheckpointError(f"{path}: its files do not hold {short[0]} exactly once")
    return checkpoint


def verify_file(checkpoint: Checkpoint, name: str) -> None:
    """Compare one file with its entry in the manifest."""
    file, entry = checkpoint.path / name, checkpoint.files[name]
    check_size(checkpoint, name)
    try:
        if checkpoint.is_old or not name.endswith(PARTS):
            if sha256(file) != entry.sha256:
                raise CheckpointError(f"{file}: damaged: its content is not what was saved (sha256 differs)")
            return
        with VerifiedFile(file, entry.sha256, fast=False) as stream:
            boxes = boxes_held(entry.holds or [], list(checkpoint.table))
            names = {name_in_file(key, box, checkpoint.table[key]) for key, box in boxes}
            if names != set(stream.header.entries):
                raise CheckpointError(f"{file}: does not hold the tensors that the manifest says")
            stream.verify()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None


def check_size(checkpoint: Checkpoint, name: str) -> None:
    """Refuse a file that is missing or has another size than when it was saved."""
    file, want = checkpoint.path / name, checkpoint.files[name].bytes
    try:
        size = check_file(file)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    if size != want:
        raise CheckpointError(f"{file}: damaged: has {size} bytes, the manifest says {want}")


def found(folder: Path) -> list[Path]:
    """Return the folders of the checkpoints in `folder`, newest first, verified or not."""
    if not folder.is_dir():
        return []
    named = [
        (int(match[2]), not match[3], path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for *_, path in sorted(named, reverse=True)]


def folder_of(folder: Path, step: int) -> Path:
    """Return the folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def publish(aside: Path, target: Path) -> None:
    """Rename a folder, whose files are synced, to `target`. An older checkpoint of the same step stays readable under
    another name.
    """
    sync(aside)
    if target.exists():
        os.rename(target, old_name(target))
    os.rename(aside, target)
    sync(target.parent)


def old_name(target: Path) -> Path:
    """Return a name that is free for an older checkpoint of the same step."""
    names = (target.with_name(f"{target.name}{OLD}{number or ''}") for number in itertools.count())
    return next(path for path in names if not path.exists())


def write_latest(folder: Path, name: str) -> None:
    """Record the newest checkpoint that is complete on all nodes."""
    replace_file(folder / LATEST, f"{name}\n".encode())
