"""Folders of DeepSpeed: model_states and optim_states of ZeRO 0 to 3, layers of pipelines, and universal checkpoints.

With ZeRO the fp32 masters and AdamW's averages are flat and divided among the data parallel ranks. They are read as
slices of these files, so that only one tensor is in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.part import MOMENTS
from trainer.errors import CheckpointError
from trainer.weights.files.torch_read import attributes, read_torch, read_torch_dict
from trainer.weights.files.torch_state import by_name, flat, is_same, masters_of, number_of
from trainer.weights.lazy import Lazy, NamedState, Shape, rows_of, shaped, stacked

POINTERS = ("latest_universal", "latest")
UNIVERSAL = "zero"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
MASTERS = "fp32"
ROWS = "single_partition_of_fp32_groups"
Flat = dict[str, Lazy]
"""The tensors of one group of parameters as one row: masters and averages."""


class StateUnknown(CheckpointError):
    """The optimizer's state cannot be assigned to the parameters."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, "leave out --state to import the weights alone")


@dataclass(frozen=True)
class Saved:
    """The contents of a folder: the tensors of each model parallel rank, and what the first rank records."""

    folder: Path
    ranks: Sequence[NamedState]
    facts: Mapping[str, Any]
    optimizer_steps: int
    layers: Sequence[Mapping[int, Mapping[str, Lazy]]] = ()
    """For a pipeline, the tensors of each layer on each tensor parallel rank; else empty."""
    unknown: StateUnknown | None = None
    """Why the optimizer's state cannot be read; None if it can."""


def step_folder(folder: Path, pointers: Sequence[str] = POINTERS) -> Path:
    """Return the folder with the files: this folder, or the one that its pointer names."""
    for name in pointers:
        pointer = folder / name
        if pointer.is_file():
            tag = pointer.read_text(errors="replace")[:256].strip()
            if not tag or tag != Path(tag).name or tag in (".", ".."):
                raise CheckpointError(f"{pointer}: {tag!r} is not the name of a folder")
            return folder / tag
    return folder


def files_of(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Return the files whose names match the pattern, by the numbers in their names."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            found[tuple(int(number or 0) for number in match.groups())] = path
    return found


def has_deepspeed(folder: Path) -> bool:
    """Return whether a folder contains files with DeepSpeed's names."""
    return bool(files_of(folder, _MODEL)) or (folder / UNIVERSAL / "optimizer_state.pt").is_file()


def read_step(folder: Path) -> Saved:
    """Return the contents of a folder of one step; tensors are not read yet."""
    models = files_of(folder, _MODEL)
    first = {mp: file for (dp, mp), file in models.items() if dp == 0}
    if not first or sorted(first) != list(range(len(first))):
        raise CheckpointError(f"{folder}: lacks some of mp_rank_XX_model_states.pt")
    documents = [read_torch_dict(first[mp]) for mp in range(len(first))]
    if (folder / UNIVERSAL).is_dir():
        state, steps = _universal(folder / UNIVERSAL)
        return Saved(folder, [state], documents[0], steps)
    layers = _layers(folder, len(first))
    optimizers = files_of(folder, _OPTIM)
    ranks, steps, unknown = [], 0, None
    for mp, document in enumerate(documents):
        own = {dp: file for (dp, at), file in optimizers.items() if at == mp}
        state = NamedState(_module(document, first[mp]))
        try:
            if own:
                known = _by_layer(layers[mp % len(layers)]) if layers else state.weights
                state, steps = _with_shards(folder, state, document, own, mp, known)
            elif document.get("optimizer") is not None and not layers:
                state, steps = _undivided(state.weights, attributes(document["optimizer"]), first[mp])
        except StateUnknown as error:
            unknown = error
        ranks.append(state)
    if layers and not optimizers and any(document.get("optimizer") is not None for document in documents):
        try:
            ranks, steps = _with_stages(layers, documents, first)
        except StateUnknown as error:
            unknown = error
    return Saved(folder, ranks, documents[0], steps, layers, unknown)


def _layers(folder: Path, ranks: int) -> list[dict[int, Mapping[str, Lazy]]]:
    """Return the tensors of each layer of a pipeline, for each tensor parallel rank; [] without a pipeline."""
    found: list[dict[int, Mapping[str, Lazy]]] = []
    files = files_of(folder, _LAYER)
    for (layer, model), file in sorted(files.items(), key=lambda item: (item[0][1], item[0][0])):
        if model > len(found) or model >= ranks:
            raise CheckpointError(f"{file}: there is no model parallel rank {min(model, len(found))}")
        if model == len(found):
            found.append({})
        found[model][layer] = dict(flat(read_torch(file), file))
    if found and (ranks % len(found) or any(set(own) != set(found[0]) for own in found)):
        problem = f"{folder}: lacks layer_NN-model_NN-model_states.pt of some rank or layer"
        raise CheckpointError(problem, "copy the files of all ranks")
    return found


def _by_layer(layers: Mapping[int, Mapping[str, Lazy]]) -> dict[str, Lazy]:
    """Return the tensors of all layers, with the layer's number in each name."""
    return {f"{number}.{name}": tensor for number, layer in layers.items() for name, tensor in layer.items()}


def _module(document: Mapping[str, Any], file: Path) -> dict[str, Lazy]:
    """Return the tensors of the module; {} for a pipeline, which has a file per layer instead."""
    module = document.get("module")
    return {} if module is None else dict(flat(module, file))


# -- ZeRO 1 to 3 ----------------------------------------------------------------------------------------------


def _with_shards(
    folder: Path,
    state: NamedState,
    document: Mapping[str, Any],
    files: Mapping[int, Path],
    mp: int,
    known: Mapping[str, Lazy],
) -> tuple[NamedState, int]:
    """Return masters and averages from the files of all data parallel ranks, and the optimizer's steps.

    `known`: the weights, whose names and shapes are used if DeepSpeed recorded none.
    """
    if sorted(files) != list(range(len(files))):
        raise CheckpointError(f"{folder}: lacks some of zero_pp_rank_X_mp_rank_{mp:02d}_optim_states.pt")
    documents = [
        attributes(read_torch_dict(files[dp]).get("optimizer_state_dict")) for dp in range(len(files))
    ]
    world = documents[0].get("partition_count")
    world = world[0] if isinstance(world, list) and world else world
    if type(world) is int and world != len(files):
        raise CheckpointError(
            f"{folder}: has {len(files)} files of an optimizer that was divided among {world} ranks"
        )
    if document.get("param_shapes") is not None:
        shapes = _shapes(document, folder)
    else:
        shapes = _of_mappings(known, documents, files) or _guessed(known, documents, files)
    if documents[0].get("fp32_flat_groups") is not None:
        found = _from_stage_3(documents, shapes, files)
    else:
        found = _from_stage_1(documents, shapes, files)
    held = _by_kind(found)
    # With ZeRO 3 the module contains empty tensors.
    filled = {name: tensor for name, tensor in state.weights.items() if tensor.rows}
    weights = {**filled, **held.pop(MASTERS)}
    moments = {kind: named for kind, named in held.items() if named}
    return NamedState(weights, moments), _steps(documents[0])


def _by_kind(found: Iterable[tuple[str, Flat]]) -> dict[str, dict[str, Lazy]]:
    """Return masters and averages by kind and name."""
    held: dict[str, dict[str, Lazy]] = {kind: {} for kind in (MASTERS, *MOMENTS)}
    for name, own in found:
        for kind, tensor in own.items():
            held[kind][name] = tensor
    return held


def _shapes(document: Mapping[str, Any], folder: Path) -> list[dict[str, Shape]]:
    groups = document.get("param_shapes")
    if isinstance(groups, dict):
        groups = [groups]
    sound = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    if not sound or not all(_is_shape(shape) for group in groups or () for shape in group.values()):
        raise CheckpointError(
            f"{folder}: its model_states lack param_shapes, which names the parameters that ZeRO divided"
        )
    return [dict(group) for group in groups or ()]


def _of_mappings(
    known: Mapping[str, Lazy], documents: Sequence[Mapping[str, Any]], files: Mapping[int, Path]
) -> list[dict[str, Shape]]:
    """Return the parameter groups according to the mappings of slices; [] without mappings."""
    # A tied module of a pipeline is in a layer's file without its name.
    tied = {f"tied_modules.{name.partition('.')[2]}": tensor for name, tensor in [*known.items()][::-1]}
    groups = list[dict[str, Shape]]()
    for document in documents:
        mappings = document.get("param_slice_mappings")
        for at, mapping in enumerate(mappings if isinstance(mappings, list) else ()):
            groups += [{}] * (at + 1 - len(groups))
            for name in attributes(mapping):
                found = known.get(name, tied.get(re.sub(r"^(tied_modules\.)[^.]+\.", r"\1", str(name))))
                if found is None:
                    raise StateUnknown(f"{files[0]}: param_slice_mappings names {name}, which is in no layer")
                groups[at] = {**groups[at], name: found.shape}
    return groups


def _guessed(
    module: Mapping[str, Lazy], documents: Sequence[Mapping[str, Any]], files: Mapping[int, Path]
) -> list[dict[str, Shape]]:
    """Return the parameter groups if no names are recorded: all parameters in order, or matrices and vectors.

    They are accepted if the masters equal the weights. A tied matrix at the end is in no group.
    """
    ranks = [_rows_of_rank(document, ROWS, files[dp]) for dp, document in enumerate(documents)]
    kinds = [(True, False)] if len(ranks[0]) == 1 else [(True,), (False,)]
    if len(ranks[0]) != len(kinds):
        groups = len(ranks[0])
        raise StateUnknown(
            f"{files[0]}: there are {groups} groups of parameters, but no param_shapes with their names"
        )
    shapes = []
    for at, kind in enumerate(kinds):
        left = sum(rank[at][MASTERS].rows for rank in ranks if at < len(rank))
        group = dict[str, Shape]()
        for name, tensor in module.items():
            if (len(tensor.shape) > 1) in kind and math.prod(tensor.shape) <= left:
                group[name] = tensor.shape
                left -= math.prod(tensor.shape)
        shapes.append(group)
    for name, own in _from_stage_1(documents, shapes, files):
        if not is_same(own[MASTERS], module[name]):
            raise StateUnknown(f"{files[0]}: its masters are not in the model's order: {name} differs")
    return shapes


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
            return number_of(step)
    return 0


def _rows_of_rank(document: Mapping[str, Any], masters: str, file: Path) -> list[Flat]:
    """Return the rows of one rank: masters and averages of each group."""
    rows = []
    states = _groups(document)
    for at, master in enumerate(document.get(masters) or ()):
        flat = {MASTERS: master}
        state = states[at] if at < len(states) else {}
        flat |= {moment: state[moment] for moment in MOMENTS if moment in state}
        if not all(isinstance(row, Lazy) for row in flat.values()):
            raise CheckpointError(
                f"{file}: group {at} of the optimizer contains something other than tensors"
            )
        rows.append(flat)
    return rows


def _from_stage_1(
    documents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Shape]], files: Mapping[int, Path]
) -> Iterator[tuple[str, Flat]]:
    """Yield each parameter: ranks have equal parts of a group's row, and record which parameter is where."""
    ranks = [_rows_of_rank(document, ROWS, files[dp]) for dp, document in enumerate(documents)]
    mappings = [document.get("param_slice_mappings") for document in documents]
    for at, group in enumerate(shapes):
        rows = [rank[at] for rank in ranks if at < len(rank)]
        if len(rows) < len(ranks):
            raise CheckpointError(f"{files[0]}: has fewer groups than the model")
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
    """Return where a rank's part of a parameter is in its row, and how many numbers it has."""
    address = attributes(attributes(mapping).get(name))
    start, count = address.get("start", 0), address.get("numel", 0)
    if type(start) is not int or type(count) is not int or start < 0 or count < 0:
        raise CheckpointError(f"{name}: is not in the optimizer's rows")
    return start, count


def _overlaps(sizes: Sequence[int], begin: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the part of each row that is in [begin, begin + count) of the concatenated rows."""
    at = 0
    for size in sizes:
        first, last = max(begin, at), min(begin + count, at + size)
        yield (first - at, last - first) if first < last else (0, 0)
        at += size


def _from_stage_3(
    documents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Shape]], files: Mapping[int, Path]
) -> Iterator[tuple[str, Flat]]:
    """Yield each parameter: every rank has an equal part of each, and its parts are concatenated."""
    rows = []
    for dp, document in enumerate(documents):
        own = _rows_of_rank(document, "fp32_flat_groups", files[dp])
        if not own:
            raise CheckpointError(f"{files[dp]}: contains no fp32_flat_groups")
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


# -- without ZeRO, and universal ------------------------------------------------------------------------------


def _undivided(
    weights: Mapping[str, Lazy], optimizer: Mapping[str, Any], file: Path, every: bool = False
) -> tuple[NamedState, int]:
    """Return masters and averages of an undivided optimizer, and its steps; `every`: it must have all weights.

    The optimizer is torch's, or DeepSpeed's wrapper for 16 bits, which has fp32 copies: one per parameter, or one row
    per group.
    """
    inner = attributes(optimizer.get("optimizer_state_dict")) or optimizer
    entries = [attributes(entry) for entry in attributes(inner.get("state")).values()]
    if not entries:
        raise StateUnknown(
            f"{file}: 'optimizer' has no state: it took no steps, or its state is in another file"
        )
    if not all(moment in entry for entry in entries if entry for moment in MOMENTS):
        keys = ", ".join(sorted({str(key) for entry in entries for key in entry})[:4])
        raise StateUnknown(f"{file}: 'optimizer' is not AdamW: its state has {keys}")
    if optimizer.get("fp32_groups_flat") is not None:
        document = {"base_optimizer_state": inner, ROWS: optimizer["fp32_groups_flat"]}
        shapes = _guessed(weights, [document], {0: file})
        held = _by_kind(_from_stage_1([document], shapes, {0: file}))
        whole = sum(row[MASTERS].rows for row in _rows_of_rank(document, ROWS, file))
        placed = sum(math.prod(shape) for group in shapes for shape in group.values())
        masters = held.pop(MASTERS)
        if placed != whole or (every and len(masters) < len(weights)):
            raise StateUnknown(f"{file}: fp32_groups_flat has {whole:,} numbers, but the model {placed:,}")
        return NamedState({**weights, **masters}, held), _steps(document)
    # A tied output matrix is in the state dict but not among the optimizer's parameters.
    numbered = by_name({name: tensor.shape for name, tensor in weights.items()}, inner, every)
    if numbered is None:
        raise StateUnknown(f"{file}: the shapes in 'optimizer' are not the model's, in its order")
    copies = masters_of(numbered.groups, optimizer.get("fp32_groups"), weights)
    if copies is None:
        raise StateUnknown(f"{file}: fp32_groups are not the weights, in the model's order")
    return NamedState({**weights, **copies}, numbered.moments), numbered.steps


def _with_stages(
    layers: Sequence[Mapping[int, Mapping[str, Lazy]]],
    documents: Sequence[Mapping[str, Any]],
    files: Mapping[int, Path],
) -> tuple[list[NamedState], int]:
    """Return masters and averages of each rank of a pipeline under the names of its layers, such as `3.mlp.weight`.

    No file records which layers are on which stage. A stage has adjacent layers, and its optimizer fits exactly one
    number of layers. A module that two stages share comes first on both.
    """
    found, steps, first = list[NamedState](), 0, [0] * len(layers)
    numbers = sorted(layers[0])
    for mp, document in enumerate(documents):
        own, begin = layers[mp % len(layers)], first[mp % len(layers)]
        optimizer, unknown = attributes(document.get("optimizer")), None
        for last in range(begin + 1, len(numbers) + 1):
            for shared in ([], *([number] for number in numbers[:begin])):
                held = _by_layer({number: own[number] for number in (*shared, *numbers[begin:last])})
                try:
                    state, steps = _undivided(held, optimizer, files[mp], every=True)
                except StateUnknown as error:
                    unknown = error
                    continue
                found.append(state)
                first[mp % len(layers)] = last
                break
            if first[mp % len(layers)] == last:
                break
        else:
            raise unknown or StateUnknown(f"{files[mp]}: there are no layers left for this stage")
    if any(last < len(numbers) for last in first):
        raise StateUnknown(f"{files[0]}: no stage's optimizer has the layer {numbers[min(first)]}")
    return found, steps


def _universal(folder: Path) -> tuple[NamedState, int]:
    """Return masters and averages of the parameters, each of which has a folder of its own."""
    weights: dict[str, Lazy] = {}
    moments: dict[str, dict[str, Lazy]] = {}
    steps = 0
    for file in sorted(folder.glob("*/*.pt")):
        kind, name = file.stem, file.parent.name
        found = read_torch(file)
        tensor = found.get("param") if isinstance(found, dict) else found
        if kind == "step":
            steps = number_of(tensor or 0)
        elif not isinstance(tensor, Lazy):
            raise CheckpointError(f"{file}: contains no tensor")
        elif kind == MASTERS:
            weights[name] = tensor
        elif kind in MOMENTS:
            moments.setdefault(kind, {})[name] = tensor
    if not weights:
        raise CheckpointError(f"{folder}: contains no NAME/{MASTERS}.pt")
    if steps == 0 and (folder / "optimizer_state.pt").is_file():
        steps = _steps(attributes(read_torch(folder / "optimizer_state.pt")))
    return NamedState(weights, moments), steps
