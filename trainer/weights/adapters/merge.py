"""Merge the adapters of a checkpoint with their base weights, which a fingerprint identifies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.manifest import BaseWeights, Origin
from trainer.checkpoint.names import Shape
from trainer.checkpoint.store import Checkpoint, open_checkpoint
from trainer.config.lora import LoraConfig, is_of_experts, module_of, sections_of
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError, InputError
from trainer.model.adapter import MARK
from trainer.side_files import SIDE_FILES
from trainer.weights.contents import AdapterContents, Contents, Progress
from trainer.weights.initial import open_source
from trainer.weights.lazy import Lazy, in_memory
from trainer.weights.ours import read_ours, shapes_for

# A fingerprint covers this many numbers at both ends of a tensor.
COVERED = 1024


def adapters_of(found: Checkpoint) -> LoraConfig | None:
    """Return the config of a checkpoint's adapters; None for a checkpoint of whole weights."""
    if found.manifest.base is None:
        return None
    lora = found.manifest.config.tune.lora
    wrong = [str(fault) for fault in found.manifest.faults if fault.key.startswith("config.tune")]
    if wrong or not lora.rank:
        problem = wrong[0] if wrong else "config.tune.lora.rank is 0"
        raise CheckpointError(f"{found.path}: names base weights, but has no adapters: {problem}")
    return lora


def fingerprint(tensors: Mapping[str, Lazy]) -> str:
    """Return a hash of weights: of each tensor's name, its shape, and numbers of its first and last row in fp32."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        lazy = tensors[name]
        digest.update(f"{name} {lazy.shape}".encode())
        for at in (0, lazy.rows - 1):
            row = lazy.read(at, at + 1).flatten()
            ends = torch.cat([row[:COVERED], row[-COVERED:]]) if len(row) > COVERED else row
            digest.update(ends.to(torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def contents_at(path: Path) -> Contents:
    """Return the weights at a path, in any known format."""
    source = open_source(path)
    return source.contents or read_ours(source.folder, state=False)


def base_at(path: Path) -> BaseWeights:
    """Return what a checkpoint of adapters records about the base weights at a path."""
    contents = contents_at(path)
    return BaseWeights(str(Path(contents.origin.path).resolve()), fingerprint(contents.parameters))


@dataclass(frozen=True)
class Whole(Checkpoint):
    """A checkpoint of adapters that reads as whole weights: its base with the adapters added."""

    lazies: Mapping[str, Lazy] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Shape]:
        return {name: lazy.shape for name, lazy in self.lazies.items()}

    def read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        return {key: self.lazies[key].whole().to(torch.float32) for key in keys}


def whole(found: Checkpoint, base: Path | None = None) -> Checkpoint:
    """Return a checkpoint as one of whole weights; `base`: the folder of its adapters' base weights."""
    lora = adapters_of(found)
    if lora is None:
        if base is not None:
            raise InputError(
                f"--base: {found.path} contains whole weights and no adapters", "leave --base out"
            )
        return found
    weights = merged(found, found.model, lora, _base_of(found, base).parameters)
    return Whole(found.path, found.manifest, weights)


def _base_of(found: Checkpoint, named: Path | None) -> Contents:
    """Return the base weights of a checkpoint's adapters; refuse other weights."""
    wanted = found.manifest.base
    assert wanted is not None
    path = named or Path(wanted.source)
    if not path.exists():
        problem = f"{found.path}: contains only adapters, and their base weights are not at {path}"
        raise CheckpointError(problem, "copy them there, or name them with --base DIR")
    contents = contents_at(path)
    if (other := fingerprint(contents.parameters)) != wanted.fingerprint:
        problem = (
            f"{found.path}: its adapters belong to weights with the fingerprint {wanted.fingerprint[:16]}"
        )
        raise CheckpointError(f"{problem}, and {path} has {other[:16]}", "name the weights it was trained on")
    return contents


def merged(
    found: Checkpoint, model: ModelConfig, lora: LoraConfig, base: Mapping[str, Lazy]
) -> dict[str, Lazy]:
    """Return base weights with the adapters of a checkpoint added."""
    shapes = shapes_for(model)
    wrong = sorted(name for name, shape in shapes.items() if name not in base or base[name].shape != shape)
    if wrong:
        raise CheckpointError(
            f"{found.path}: its adapters belong to a model whose {wrong[0]} differs from that of its base"
        )
    pairs = found.read(list(found.weights))
    return {name: with_adapters(name, base[name], pairs, model, lora) for name in shapes}


def with_adapters(
    name: str, lazy: Lazy, pairs: Mapping[str, Tensor], model: ModelConfig, lora: LoraConfig
) -> Lazy:
    """Return a base tensor with its adapters from `pairs` added, or the tensor of its name there; else itself."""
    if name in pairs:
        return in_memory(pairs[name])
    path, _, leaf = name.rpartition(".")
    prefix = path + MARK
    own = {key: tensor for key, tensor in pairs.items() if key.startswith(prefix)}
    if leaf != "weight" or not own:
        return lazy
    module = module_of(name)
    first, added = 0, list[tuple[int, Tensor, Tensor]]()
    if f"{prefix}all.a" in own:
        added.append((0, own[f"{prefix}all.a"], own[f"{prefix}all.b"]))
    for section, width in sections_of(model, module).items():
        if f"{prefix}{section}.a" in own and section != "all":
            added.append((first, own[f"{prefix}{section}.a"], own[f"{prefix}{section}.b"]))
        first += width
    read = _matrices_of_experts if is_of_experts(model, module) else _rows
    return Lazy(lazy.shape, torch.float32, partial(read, lazy, added, lora.scale), lazy.at_once)


def _rows(
    lazy: Lazy, added: Sequence[tuple[int, Tensor, Tensor]], scale: float, start: int, stop: int
) -> Tensor:
    rows = lazy.read(start, stop).to(torch.float32, copy=True)
    for first, a, b in added:
        begin, end = max(start, first), min(stop, first + len(b))
        if begin < end:
            rows[begin - start : end - start].addmm_(b[begin - first : end - first], a, alpha=scale)
    return rows


def _matrices_of_experts(
    lazy: Lazy, added: Sequence[tuple[int, Tensor, Tensor]], scale: float, start: int, stop: int
) -> Tensor:
    """Return the matrices of experts [start, stop) with their adapters added."""
    matrices = lazy.read(start, stop).to(torch.float32, copy=True)
    for first, a, b in added:
        own = matrices[:, first : first + b.shape[1]]
        own.baddbmm_(b[start:stop], a[start:stop], alpha=scale)
    return matrices


def read_whole(folder: Path, state: bool, base: Path | None = None) -> Contents:
    """Return the contents of our checkpoint; adapters are added to their base weights."""
    found = open_checkpoint(folder)
    lora = adapters_of(found)
    if lora is None:
        if base is not None:
            raise InputError(f"--base: {folder} contains whole weights and no adapters", "leave --base out")
        return read_ours(folder, state)
    if state:
        problem = f"{folder}: the optimizer's state belongs to the adapters, not to the weights"
        raise InputError(problem, "leave out --state")
    below = _base_of(found, base)
    model, known = found.model, found.manifest.base
    assert known is not None
    side = {name: found.path / name for name in SIDE_FILES if name in found.files}
    return Contents(
        model,
        merged(found, model, lora, below.parameters),
        Origin("clusterctl", str(folder), before=below.origin.before or below.origin),
        {**below.files, **side},
        Progress(found.step),
        found.manifest.config,
        ("the adapters are added to their base weights",),
        AdapterContents(lora, found.read(list(found.weights)), known),
    )
