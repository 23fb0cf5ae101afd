"""Folders of DeepSpeed: model_states and optim_states of ZeRO 0 to 3, layers of pipelines, and universal checkpoints.

With ZeRO the fp32 masters and AdamW's averages are flat, and divided among the data parallel ranks. They are read as
slices of those files, so that one tensor is in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.part import MOMENTS
from trainer.errors import CheckpointError
from trainer.weights.contents import NamedState
from trainer.weights.files.torch_read import attributes, read_torch
from trainer.weights.files.torch_state import by_name
from trainer.weights.lazy import Lazy, Shape, rows_of, stacked

POINTERS = ("latest_universal", "latest")
UNIVERSAL = "zero"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
MASTERS = "fp32"
Flat = dict[str, Lazy]
"""Tensors of one group of parameters in a row: masters and averages."""


@dataclass(frozen=True)
class Saved:
    """What a folder holds: the tensors of each model parallel rank, and what the first records beside them."""

    folder: Path
    ranks: Sequence[NamedState]
    facts: Mapping[str, Any]
    optimizer_steps: int
    layers: Sequence[Mapping[int, Mapping[str, Lazy]]] = ()
    """Of a pipeline, the tensors of each layer of each tensor parallel rank."""


def step_folder(folder: Path) -> Path:
    """Return the folder with the files: this one, or the one that a pointer in it names."""
    for name in POINTERS:
        pointer = folder / name
        if pointer.is_file():
            tag = pointer.read_text(errors="replace")[:256].strip()
            if not tag or tag != Path(tag).name or tag in (".", ".."):
                raise CheckpointError(f"{pointer}: {tag!r} is not the name of a folder")
            return folder / tag
    return folder


def files_of(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Return the files whose names match, by the numbers in their names."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            found[tuple(int(number or 0) for number in match.groups())] = path
    return found


def has_deepspeed(folder: Path) -> bool:
    """Return whether a folder has the names of DeepSpeed's files."""
    return bool(files_of(folder, _MODEL)) or (folder / UNIVERSAL / "optimizer_state.pt").is_file()


def read_step(folder: Path) -> Saved:
    """Return what a folder of one step holds; nothing of its tensors is read yet."""
    models = files_of(folder, _MODEL)
    first = {mp: file for (dp, mp), file in models.items() if dp == 0}
    if not first or sorted(first) != list(range(len(first))):
        raise CheckpointError(f"{folder}: lacks some of mp_rank_XX_model_states.pt")
    documents = [_document(first[mp]) for mp in range(len(first))]
    if (folder / UNIVERSAL).is_dir():
        state, steps = _universal(folder / UNIVERSAL)
        return Saved(folder, [state], documents[0], steps)
    optimizers = files_of(folder, _OPTIM)
    ranks, steps = [], 0
    for mp, document in enumerate(documents):
        own = {dp: file for (dp, at), file in optimizers.items() if at == mp}
        state = NamedState(_module(document, first[mp]))
        if own:
            state, steps = _with_shards(folder, state, document, own, mp)
        elif document.get("optimizer") is not None:
            state, steps = _with_optimizer(state, attributes(document["optimizer"]))
        ranks.append(state)
    layers = files_of(folder, _LAYER)
    found: list[dict[int, Mapping[str, Lazy]]] = []
    for (layer, model), file in sorted(layers.items(), key=lambda item: (item[0][1], item[0][0])):
        found += [{}] * (model + 1 - len(found)) if model < len(first) else []
        if model >= len(found):
            raise CheckpointError(f"{file}: there is no model parallel rank {model}")
        found[model] = {**found[model], layer: _tensors(read_torch(file), file)}
    if len(found) == 1 and not optimizers:
        stages = _with_stages(found[0], [attributes(document.get("optimizer")) for document in documents])
        ranks = [state for state, _ in stages] or ranks
        steps = max((taken for _, taken in stages), default=steps)
    return Saved(folder, ranks, documents[0], steps, found)


def _document(file: Path) -> Mapping[str, Any]:
    document = read_torch(file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a dict")
    return document


def _module(document: Mapping[str, Any], file: Path) -> dict[str, Lazy]:
    """Return the tensors of the module; of a pipeline, which has them in files of layers, nothing."""
    module = document.get("module")
    return {} if module is None else _tensors(module, file)


def _tensors(document: object, file: Path, prefix: str = "", depth: int = 0) -> dict[str, Lazy]:
    if not isinstance(document, dict) or depth > 12:
        raise CheckpointError(f"{file}: the state of the model is not a dict of tensors")
    found: dict[str, Lazy] = {}
    for key, value in document.items():
        if isinstance(value, Lazy):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            found |= _tensors(value, file, f"{prefix}{key}.", depth + 1)
    return found


# -- ZeRO 1 to 3 ----------------------------------------------------------------------------------------------


def _with_shards(
    folder: Path, state: NamedState, document: Mapping[str, Any], files: Mapping[int, Path], mp: int
) -> tuple[NamedState, int]:
    """Return masters and averages from the files of all data parallel ranks, and the optimizer's steps."""
    if sorted(files) != list(range(len(files))):
        raise CheckpointError(f"{folder}: lacks some of zero_pp_rank_X_mp_rank_{mp:02d}_optim_states.pt")
    documents = [attributes(_document(files[dp]).get("optimizer_state_dict")) for dp in range(len(files))]
    world = documents[0].get("partition_count")
    world = world[0] if isinstance(world, list) and world else world
    if type(world) is int and world != len(files):
        raise CheckpointError(f"{folder}: has {len(files)} files of an optimizer that {world} ranks divided")
    shapes = (
        _shapes(document, folder) if "param_shapes" in document else _guessed(state.weights, documents, files)
    )
    if documents[0].get("fp32_flat_groups") is not None:
        found = _from_stage_3(documents, shapes, files)
    else:
        found = _from_stage_1(documents, shapes, files)
    held: dict[str, dict[str, Lazy]] = {kind: {} for kind in (MASTERS, *MOMENTS)}
    for name, flat in found:
        for kind, tensor in flat.items():
            held[kind][name] = tensor
    # ZeRO 3 leaves empty tensors in the module.
    filled = {name: tensor for name, tensor in state.weights.items() if tensor.rows}
    weights = {**filled, **held.pop(MASTERS)}
    moments = {kind: named for kind, named in held.items() if named}
    return NamedState(weights, moments), _steps(documents[0])


def _shapes(document: Mapping[str, Any], folder: Path) -> list[dict[str, Shape]]:
    groups = document.get("param_shapes")
    if isinstance(groups, dict):
        groups = [groups]
    sound = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    if not sound or not all(_is_shape(shape) for group in groups or () for shape in group.values()):
        raise CheckpointError(f"{folder}: its model_states lack param_shapes, the names of what ZeRO divided")
    return [dict(group) for group in groups or ()]


def _guessed(
    module: Mapping[str, Lazy], documents: Sequence[Mapping[str, Any]], files: Mapping[int, Path]
) -> list[dict[str, Shape]]:
    """Return the groups of an older version, which recorded no names: all in order, or matrices and vectors.

    They are accepted if the masters that they lead to are the weights.
    """
    kinds = {name: len(tensor.shape) > 1 for name, tensor in module.items()}
    rows = _rows_of_rank(documents[0], "single_partition_of_fp32_groups", files[0])
    if len(rows) == 1:
        groups = [dict(module)]
    else:
        groups = [
            {name: module[name] for name in module if kinds[name] is wanted} for wanted in (True, False)
        ]
    shapes = [{name: tensor.shape for name, tensor in group.items()} for group in groups]
    if not rows or len(rows) != len(groups):
        problem = f"{files[0]}: an optimizer of {len(rows)} groups, and no param_shapes names what is in them"
        raise CheckpointError(problem, "leave out --state to import the weights alone")
    for name, flat in _from_stage_1(documents, shapes, files):
        weight, master = module[name], flat[MASTERS]
        first, last = master.read(0, 1), master.read(weight.rows - 1, weight.rows)
        if not (_same(first, weight.read(0, 1)) and _same(last, weight.read(weight.rows - 1, weight.rows))):
            problem = f"{files[0]}: its masters are not in the model's order, seen from {name}"
            raise CheckpointError(problem, "leave out --state to import the weights alone")
    return shapes


def _same(master: Tensor, weight: Tensor) -> bool:
    return torch.equal(master.to(weight.dtype), weight)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 < size < 1 << 40 for size in value)


def _groups(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the optimizer's state of each group of parameters."""
    base = document.get("base_optimizer_state", document.get("optimizer_state_dict"))
    if isinstance(base, list):
        return [attributes(entry) for entry in base]
    states = attributes(attributes(base).get("state"))
    return [attributes(states[key]) for key in sorted(states)]


def _steps(document: Mapping[str, Any]) -> int:
    for group in _groups(document):
        if (step := group.get("step")) is not None:
            return int(step.whole().view(-1)[0]) if isinstance(step, Lazy) else int(step)
    return 0


def _rows_of_rank(document: Mapping[str, Any], masters: str, file: Path) -> list[Flat]:
    """Return the rows of numbers that one rank has: masters and averages of each group."""
    rows = []
    states = _groups(document)
    for at, master in enumerate(document.get(masters) or ()):
        flat = {MASTERS: master}
        state = states[at] if at < len(states) else {}
        flat |= {moment: state[moment] for moment in MOMENTS if moment in state}
        if not all(isinstance(row, Lazy) for row in flat.values()):
            raise CheckpointError(f"{file}: group {at} of the optimizer is not of tensors")
        rows.append(flat)
    return rows


def _from_stage_1(
    documents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Shape]], files: Mapping[int, Path]
) -> Iterator[tuple[str, Flat]]:
    """Yield each parameter: ranks have equal parts of the row of a group, and record what is where."""
    ranks = [
        _rows_of_rank(document, "single_partition_of_fp32_groups", files[dp])
        for dp, document in enumerate(documents)
    ]
    mappings = [document.get("param_slice_mappings") for document in documents]
    for at, group in enumerate(shapes):
        rows = [rank[at] for rank in ranks if at < len(rank)]
        if len(rows) < len(ranks):
            raise CheckpointError(f"{files[0]}: has fewer groups than the model has")
        begun = 0
        for name, shape in group.items():
            count = math.prod(shape)
            if all(isinstance(mapping, list) and at < len(mapping) for mapping in mappings):
                pieces = [_piece(mapping[at], name) for mapping in mappings if mapping]
            else:
                pieces = list(_overlaps([row[MASTERS].rows for row in rows], begun, count))
            begun += count
            yield name, _assembled(name, shape, rows, pieces, files[0])


def _piece(mapping: object, name: str) -> tuple[int, int]:
    """Return where in its row a rank has a part of a parameter, and how many numbers."""
    address = attributes(attributes(mapping).get(name))
    start, count = address.get("start", 0), address.get("numel", 0)
    if type(start) is not int or type(count) is not int or start < 0 or count < 0:
        raise CheckpointError(f"{name}: has no place in the optimizer's rows")
    return start, count


def _overlaps(sizes: Sequence[int], begin: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield which part of each row is in [begin, begin + count) of all rows in order."""
    at = 0
    for size in sizes:
        first, last = max(begin, at), min(begin + count, at + size)
        yield (first - at, last - first) if first < last else (0, 0)
        at += size


def _from_stage_3(
    documents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Shape]], files: Mapping[int, Path]
) -> Iterator[tuple[str, Flat]]:
    """Yield each parameter: every rank has an equal part of each, all parts in a row."""
    rows = []
    for dp, document in enumerate(documents):
        own = _rows_of_rank(document, "fp32_flat_groups", files[dp])
        if not own:
            raise CheckpointError(f"{files[dp]}: holds no fp32_flat_groups")
        kinds = [kind for kind in (MASTERS, *MOMENTS) if all(kind in flat for flat in own)]
        rows.append({kind: stacked([flat[kind] for flat in own]) for kind in kinds})
    begun = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        count = math.prod(shape)
        each = -(-count // len(rows))
        pieces = [(begun, max(0, min(each, count - dp * each))) for dp in range(len(rows))]
        begun += each
        yield name, _assembled(name, shape, rows, pieces, files[0])


def _assembled(
    name: str, shape: Shape, rows: Sequence[Flat], pieces: Sequence[tuple[int, int]], file: Path
) -> Flat:
    """Return a parameter and its averages from the ranks' parts."""
    held = sum(count for _, count in pieces)
    inside = all(start + count <= row[MASTERS].rows for row, (start, count) in zip(rows, pieces, strict=True))
    if held != math.prod(shape) or not inside:
        raise CheckpointError(
            f"{file}: the ranks hold {held:,} numbers of {name}, whose shape is {list(shape)}"
        )
    found = {}
    for kind in (MASTERS, *MOMENTS):
        parts = [
            rows_of(row[kind], start, start + count)
            for row, (start, count) in zip(rows, pieces, strict=True)
            if count and kind in row and row[kind].rows >= start + count
        ]
        if len(parts) == sum(count > 0 for _, count in pieces):
            found[kind] = shaped(stacked(parts), shape)
    return found


def shaped(flat: Lazy, shape: Shape) -> Lazy:
    """Return a row of numbers as a tensor; its rows are read alone."""
    shape = shape or (1,)
    return Lazy(shape, flat.dtype, partial(_rows, flat, shape))


def _rows(flat: Lazy, shape: Shape, start: int, stop: int) -> Tensor:
    each = math.prod(shape[1:])
    return flat.read(start * each, stop * each).view(stop - start, *shape[1:])


# -- without ZeRO, and universal ------------------------------------------------------------------------------


def _with_optimizer(state: NamedState, optimizer: Mapping[str, Any]) -> tuple[NamedState, int]:
    """Return the averages of a torch optimizer next to the weights, and its steps."""
    # A tied output matrix is in the state dict and not among the optimizer's parameters.
    shapes = {name: tensor.shape for name, tensor in state.weights.items()}
    found = by_name(shapes, optimizer, every=False)
    return (state, 0) if found is None else (NamedState(state.weights, found.moments), found.steps)


def _with_stages(
    layers: Mapping[int, Mapping[str, Lazy]], optimizers: Sequence[Mapping[str, Any]]
) -> list[tuple[NamedState, int]]:
    """Return the averages of each stage of a pipeline under the names of its layers, as `3.mlp.weight`.

    No file says which layers are on which stage. Stages have neighbouring layers, and a stage's optimizer fits exactly
    one number of them. A module that two stages share comes first on both.
    """
    found, first, numbers = list[tuple[NamedState, int]](), 0, sorted(layers)
    for optimizer in optimizers:
        for last in range(first + 1, len(numbers) + 1):
            own = numbers[first:last]
            shared = [number for number in numbers[:first] if number not in own]
            fitting = (by_name(_shapes_in([*extra, *own], layers), optimizer) for extra in ([], *zip(shared)))
            numbered = next((entry for entry in fitting if entry is not None), None)
            if numbered is not None:
                found.append((NamedState({}, numbered.moments), numbered.steps))
                first = last
                break
        else:
            return []
    return found if first == len(numbers) else []


def _shapes_in(numbers: Sequence[int], layers: Mapping[int, Mapping[str, Lazy]]) -> dict[str, Shape]:
    """Return the shapes of layers in this order, by names with the numbers of the layers."""
    return {f"{number}.{name}": tensor.shape for number in numbers for name, tensor in layers[number].items()}


def _universal(folder: Path) -> tuple[NamedState, int]:
    """Return the parameters that have a folder each, with files of masters and averages."""
    weights: dict[str, Lazy] = {}
    moments: dict[str, dict[str, Lazy]] = {}
    steps = 0
    for file in sorted(folder.glob("*/*.pt")):
        kind, name = file.stem, file.parent.name
        found = read_torch(file)
        tensor = found.get("param") if isinstance(found, dict) else found
        if kind == "step":
            steps = int(tensor.whole().view(-1)[0]) if isinstance(tensor, Lazy) else int(tensor or 0)
        elif not isinstance(tensor, Lazy):
            raise CheckpointError(f"{file}: holds no tensor")
        elif kind == MASTERS:
            weights[name] = tensor
        elif kind in MOMENTS:
            moments.setdefault(kind, {})[name] = tensor
    if not weights:
        raise CheckpointError(f"{folder}: holds no NAME/{MASTERS}.pt")
    if steps == 0 and (folder / "optimizer_state.pt").is_file():
        steps = _steps(attributes(read_torch(folder / "optimizer_state.pt")))
    return NamedState(weights, moments), steps
