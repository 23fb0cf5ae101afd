"""Our checkpoints as contents, and contents as our checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

import native
from clusterctl.wire.saved import MANIFEST, PARTS, SavedFile, encode_manifest
from trainer.checkpoint.manifest import Manifest, Origin
from trainer.checkpoint.names import Shape, tensor_table
from trainer.checkpoint.part import MOMENTS, Part, whole_box
from trainer.checkpoint.read import read_parts
from trainer.checkpoint.store import Checkpoint, open_checkpoint, verify, verify_file
from trainer.checkpoint.write import write_parts
from trainer.config.model import ModelConfig
from trainer.config.rules import model_faults
from trainer.errors import CheckpointError
from trainer.model.cuts import Cut, cuts_of, shapes_of
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.side_files import SIDE_FILES
from trainer.weights.contents import Contents, Progress
from trainer.weights.lazy import Lazy
from trainer.weights.rules import check_shapes, refuse_unknown, with_moments
from trainer.weights.target import Target

LEAST_FILE = 64 << 20
"""The bytes of a file of an imported checkpoint, or a quarter of the largest tensor if that is more."""


def shapes_for(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of a model's logical tensors, by name."""
    with torch.device("meta"):
        empty = (GLM if model.kind == "glm" else GPT)(model, native.choose("cpu"))
        return shapes_of(empty, empty.parallel)


def cuts_for(model: ModelConfig) -> dict[str, Cut]:
    """Return how tensor parallel ranks divide each tensor of a model."""
    with torch.device("meta"):
        return cuts_of((GLM if model.kind == "glm" else GPT)(model, native.choose("cpu")))


# -- read ---------------------------------------------------------------------------------------------------


def read_ours(folder: Path, state: bool) -> Contents:
    """Return the contents of our checkpoint; its tensors are verified while they are read."""
    found = open_checkpoint(folder)
    if found.is_old:
        verify(folder)
    model = found.model
    if faults := list(model_faults(model)):
        raise CheckpointError(f"{folder}: {faults[0]}")
    shapes, names = shapes_for(model), list(found.weights)
    if state:
        names = with_moments(names)
        if names[-1] not in found.table:
            problem = f"{folder}: contains only weights and no optimizer state"
            raise CheckpointError(problem, "leave out --state")
    tensors = {name: _lazy(found, name) for name in names}
    refuse_unknown(str(folder), shapes, found.weights)
    check_shapes(str(folder), shapes, tensors)
    for name in set(found.files) - {file for file in found.files if file.endswith(PARTS)}:
        verify_file(found, name)
    manifest = found.manifest
    progress = Progress(
        found.step,
        manifest.optimizer_steps,
        manifest.consumed_samples,
        manifest.loss_scale,
        manifest.tokens,
        manifest.loss,
        manifest.eval_loss,
    )
    facts = {key: getattr(manifest, key) for key in ("tokens", "loss", "eval_loss") if getattr(manifest, key)}
    origin = Origin("clusterctl", str(folder), facts, before=manifest.origin)
    files = {name: folder / name for name in SIDE_FILES if name in found.files}
    return Contents(model, tensors, origin, files, progress, manifest.config)


def _lazy(found: Checkpoint, name: str) -> Lazy:
    shape = found.table[name]
    whole = Part(name, shape, whole_box(shape), torch.empty(0))
    pieces = cache(lambda: found.pieces_for([whole]))

    def read(start: int, stop: int) -> Tensor:
        rows = torch.empty((stop - start, *shape[1:]))
        part = Part(name, shape, ((start, stop), *whole_box(shape[1:])), rows)
        read_parts(found.path, [part], pieces(), found.digests)
        return rows

    return Lazy(shape, torch.float32, read)


# -- write --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """Rows of a tensor for one file."""

    key: str
    first: int
    last: int


def write_ours(contents: Contents, target: Target) -> None:
    """Write a checkpoint of ours, file by file, and verify it by the hashes in its manifest."""
    shapes = shapes_for(contents.model)
    if contents.adapters is not None:
        shapes = {name: lazy.shape for name, lazy in contents.tensors.items()}
    refuse_unknown("the source", shapes, contents.parameters)
    check_shapes("the source", shapes, contents.tensors)
    table = tensor_table(shapes, contents.with_state)
    target.total = sum(contents.tensors[key].rows * _row_bytes(shape) for key, shape in table.items())
    names = []
    for number, slices in enumerate(_files(contents.tensors, table)):
        name = f"part-{number:05d}{PARTS}"
        names.append(name)
        target.write(name, partial(_write_file, contents, table, slices))
        target.wrote(sum((piece.last - piece.first) * _row_bytes(table[piece.key]) for piece in slices))
    target.write_files(contents.files)
    names += contents.files
    manifest = _manifest(contents, table, {name: target.entries[name] for name in names})
    target.write_bytes(MANIFEST, encode_manifest(manifest.as_json()))
    target.verify_all(verify)


def _row_bytes(shape: Shape) -> int:
    numbers = 4
    for size in shape[1:]:
        numbers *= size
    return numbers


def _files(tensors: Mapping[str, Lazy], table: Mapping[str, Shape]) -> Iterator[list[Slice]]:
    """Yield the slices of each file, in the order of the table."""
    largest = max(shape[0] * _row_bytes(shape) for shape in table.values())
    most = max(LEAST_FILE, largest // 4)
    current, size = list[Slice](), 0
    for key, shape in table.items():
        each = _row_bytes(shape)
        step = shape[0] if tensors[key].at_once else max(1, most // each)
        for first in range(0, shape[0], step):
            last = min(shape[0], first + step)
            if current and size + (last - first) * each > most:
                yield current
                current, size = [], 0
            current.append(Slice(key, first, last))
            size += (last - first) * each
    yield current


def _write_file(
    contents: Contents, table: Mapping[str, Shape], slices: Sequence[Slice], file: Path
) -> SavedFile:
    parts, tensors = [], contents.tensors
    for piece in slices:
        shape = table[piece.key]
        box = ((piece.first, piece.last), *whole_box(shape[1:]))
        rows = tensors[piece.key].read(piece.first, piece.last).to(torch.float32).contiguous()
        if not piece.key.startswith(MOMENTS) and not torch.isfinite(rows).all():
            raise CheckpointError(f"{contents.origin.path}: {piece.key} holds numbers that are not finite")
        parts.append(Part(piece.key, shape, box, rows))
    return write_parts(file, parts, table)


def _manifest(contents: Contents, table: Mapping[str, Shape], files: Mapping[str, SavedFile]) -> Manifest:
    progress = contents.progress
    layout = {"world": 1, "data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "engine": "import"}
    return Manifest(
        progress.step,
        replace(contents.config, model=contents.model),
        table,
        files,
        state="all" if contents.with_state else "weights",
        optimizer_steps=progress.optimizer_steps,
        consumed_samples=progress.consumed_samples,
        tokens=progress.consumed_samples * contents.model.sequence,
        loss_scale=progress.loss_scale,
        base=contents.adapters.base if contents.adapters else None,
        origin=contents.origin,
        about={"layout": layout, "torch": torch.__version__, "time": time.time()},
    )
