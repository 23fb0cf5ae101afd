"""Distributed checkpoints of Megatron-core (`torch_dist`): one tensor for all layers, in any layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from clusterctl.wire.requests import ExportRequest, ImportRequest
from trainer.checkpoint.access import check_access
from trainer.checkpoint.manifest import Origin
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError
from trainer.weights.attention import from_sections, order_of
from trainer.weights.contents import Contents
from trainer.weights.files.distcp import METADATA, Chunk, Item, read_distcp, write_folder
from trainer.weights.files.torch_read import attributes, read_torch_dict
from trainer.weights.files.torch_write import namespace, write_torch
from trainer.weights.huggingface import as_json, read_json
from trainer.weights.lazy import DTYPES, Lazy, cast, one_of, padded, reshaped
from trainer.weights.megatron.config import arguments_for, check_fits, model_of
from trainer.weights.megatron.names import FUSED, IGNORED, IN_BLOCK, core_name, core_of, layer_of
from trainer.weights.megatron.ranks import iteration_folder, mapped, progress_of
from trainer.weights.megatron.sharded_state import (
    cuts_by_core,
    refuse_absent,
    state_by_key,
    state_in_rows,
    steps_taken,
)
from trainer.weights.ours import cuts_for
from trainer.weights.target import Target

DESCRIPTION = "metadata.json"
COMMON = "common.pt"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
STACKED = re.compile(r"(decoder\.layers)\.(?!\d)")
OTHERS = rf"{IGNORED}|(chained_\d+\.)?optimizer\..*|rng_state.*|rerun_state_machine.*"
# Matrices that need an entry for the state of fused kernels; without such kernels it is empty.
MATRICES = [core for core in IN_BLOCK.values() if "layernorm" not in core]


def is_megatron_core(folder: Path) -> bool:
    """Return whether a folder is a distributed checkpoint of Megatron-core."""
    found = iteration_folder(folder)
    return (found / DESCRIPTION).is_file() and (found / METADATA).is_file()


def read_megatron_core(folder: Path, request: ImportRequest) -> Contents:
    """Return the contents of a folder; tensors are not read yet."""
    check_access(folder)
    path = iteration_folder(folder)
    backend = read_json(path / DESCRIPTION).get("sharded_backend")
    if backend != BACKEND["sharded_backend"]:
        problem = f"{path / DESCRIPTION}: sharded_backend is {backend!r}"
        raise CheckpointError(problem, "save it with `--ckpt-format torch_dist`")
    held = read_distcp(path)
    found = dict(_by_layer(held))
    common = read_torch_dict(path / COMMON) if (path / COMMON).is_file() else {}
    arguments = attributes(common.get("args"))
    model, notes = model_of(str(path), arguments, {name: [tensor] for name, tensor in found.items()}, request)
    if not arguments:
        notes.append(f"{COMMON} records no arguments: GELU's tanh form and an eps of 1e-5 are assumed")
    tensors = _mapped(path, model, found)
    origin = Origin("megatron-core", str(path), {"iteration": common.get("iteration")})
    if not request.state:
        return Contents(model, tensors, origin, notes=tuple(notes))
    weights = {core_of(name): found[core_of(name)] for name in tensors}
    for kind, named in _state(path, model, held, weights, arguments).items():
        prefix = "" if kind == "param" else f"{kind}."
        more = _mapped(path, model, {**weights, **named} if kind == "param" else named)
        tensors |= {f"{prefix}{name}": tensor for name, tensor in more.items()}
    progress = progress_of(common, steps_taken(path, common))
    return Contents(model, tensors, origin, notes=tuple(notes), progress=progress)


def _mapped(path: Path, model: ModelConfig, found: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Return the tensors of the model under our names."""
    parts = {name: [tensor] for name, tensor in found.items()}
    return mapped(str(path), model, parts, ignored=OTHERS)


def _state(
    path: Path,
    model: ModelConfig,
    held: Mapping[str, Lazy],
    weights: Mapping[str, Lazy],
    arguments: Mapping[str, object],
) -> dict[str, dict[str, Lazy]]:
    """Return masters (`param`) and averages under Megatron-core's names; `held`: all tensors of the folder by key."""
    keys = {key: tensor for key, tensor in held.items() if not re.fullmatch(OTHERS, key)}
    by_key = state_by_key(held, keys, path)
    if by_key:
        return {kind: dict(_by_layer(named)) for kind, named in by_key.items()}
    names = {core_of(name): name for name in cuts_for(model)}
    found = state_in_rows(held, weights, cuts_by_core(names, cuts_for(model)), arguments, path)
    if not found:
        refuse_absent(held, path)
    return found


def _by_layer(tensors: Mapping[str, Lazy]) -> Iterator[tuple[str, Lazy]]:
    """Yield each tensor with its name in the model; a tensor for all layers is split into one per layer."""
    for key, tensor in tensors.items():
        if re.fullmatch(OTHERS, key):
            continue
        if not STACKED.match(key):
            yield core_name(key), tensor
            continue
        if len(tensor.shape) < 2:
            raise CheckpointError(f"{key} is for all layers, but has no dimension for them")
        for layer in range(tensor.rows):
            yield core_name(STACKED.sub(rf"\1.{layer}.", key)), one_of(tensor, layer)


def write_megatron_core(contents: Contents, target: Target, wanted: ExportRequest) -> None:
    """Write a folder that Megatron-core can load in any layout."""
    check_fits(contents.model, wanted)
    items = list(_items(contents, DTYPES[wanted.dtype], wanted.tensor))
    write_folder(target, "release/", items)
    common = {"args": namespace(arguments_for(contents, wanted)), "checkpoint_version": 3.0, "iteration": 0}
    target.write_tensors(f"release/{COMMON}", 0, partial(write_torch, document=common))
    target.write_bytes(f"release/{DESCRIPTION}", as_json(BACKEND))
    target.write_bytes("latest_checkpointed_iteration.txt", b"release")
    target.write_files(contents.files)


def _items(contents: Contents, dtype: torch.dtype, ranks: int) -> Iterator[Item]:
    """Yield the tensors of the model under Megatron-core's keys, with one tensor for all layers."""
    model, cuts = contents.model, cuts_for(contents.model)
    stacks: dict[str, list[Lazy]] = {}
    for name, ours in contents.parameters.items():
        whole = padded(ours, model.padded(ranks)) if cuts[name].rows is not None else ours
        whole, core = from_sections(whole, order_of(name), model.attention), core_of(name)
        whole = cast(whole, dtype)
        if layer_of(core) is None:
            yield Item(core, whole.shape, [Chunk((0,) * len(whole.shape), whole)])
        else:
            stacks.setdefault(_stacked_key(core), []).append(whole)
    for key, layers in stacks.items():
        shape = (model.layers, *layers[0].shape)
        chunks = [
            Chunk((number, *(0 for _ in layer.shape)), reshaped(layer, (1, *layer.shape)))
            for number, layer in enumerate(layers)
        ]
        yield Item(key, shape, chunks)
    for matrix in MATRICES:
        for number in range(model.layers):
            key = f"decoder.layers.{matrix}._extra_state/shard_{number}_{model.layers}"
            yield Item(key, value=[None])


def _stacked_key(core: str) -> str:
    key = re.sub(r"^decoder\.layers\.\d+\.", "decoder.layers.", core)
    for norm, fused in FUSED.items():
        key = key.replace(f".layers{norm}", f".layers{fused}")
    return key
