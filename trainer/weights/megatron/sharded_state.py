"""The optimizer state in a distributed checkpoint of Megatron-core: fp32 masters and AdamW's averages.

There are two forms: tensors with the model's names (`fully_reshardable`, and optimizers that are not divided), and rows
of a rank's parameters (`dp_reshardable`), in which parameters are found as in the distributed optimizer's file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from trainer.checkpoint.part import MOMENTS
from trainer.errors import CheckpointError, InputError
from trainer.model.cuts import WHOLE, Cut
from trainer.weights.attention import Rows, order_of
from trainer.weights.files.distcp import read_object
from trainer.weights.files.torch_read import attributes
from trainer.weights.files.torch_state import steps_of
from trainer.weights.lazy import Lazy, rows_of, shaped
from trainer.weights.megatron.names import IN_BLOCK, OUTPUT, layer_of, with_layer
from trainer.weights.megatron.state import ALIGNED, is_at, places
from trainer.weights.tensor_parts import joined, part_of

MASTERS = ("fp32_param", "param")
"""Megatron-core's names of the fp32 copies."""
STATE = re.compile(rf"optimizer\.state\.({'|'.join((*MASTERS, *MOMENTS))})\.(.+)")
_NUMBER = r"(\d{1,6})"
ROW = re.compile(
    rf"optimizer\.distributed\.dp_group_idx_{_NUMBER}\.gbuf_idx_{_NUMBER}\.dtype_(.+)\.bucket_idx_{_NUMBER}"
    rf"\.(param|{'|'.join(MOMENTS)})"
)
GROUP_OBJECT = "optimizer.distributed.dp_group_idx_0.optimizer"
REMEDY = "leave out --state to import the weights alone"
IN_ORDER = list(IN_BLOCK.values())
TABLES = ("embedding.word_embeddings", "embedding.position_embeddings")
TABLE = f"{TABLES[0]}.weight"
Tensors = dict[str, Lazy]


def state_by_key(
    tensors: Mapping[str, Lazy], weights: Mapping[str, Lazy], source: Path
) -> dict[str, Tensors]:
    """Return masters (`param`) and averages by the keys of the model's tensors; {} if there are rows, or nothing."""
    found: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        match = STATE.fullmatch(key)
        if match is None:
            continue
        kind = "param" if match[1] in MASTERS else match[1]
        weight = weights.get(match[2])
        if weight is None or weight.shape != tensor.shape:
            shape = "no weight" if weight is None else f"a weight of shape {list(weight.shape)}"
            problem = f"{source}: {key} has shape {list(tensor.shape)}, but belongs to {shape}"
            raise CheckpointError(problem, f"save it with --dist-ckpt-optim-fully-reshardable, or {REMEDY}")
        found.setdefault(kind, {})[match[2]] = tensor
    for kind in MOMENTS if found else ():
        missing = sorted(weights.keys() - found.get(kind, {}).keys())
        if missing:
            raise CheckpointError(f"{source}: lacks optimizer.state.{kind}.{missing[0]}", REMEDY)
    return found


def steps_taken(source: Path, common: Mapping[str, object]) -> int:
    """Return the updates that the optimizer made."""
    optimizer = attributes(common.get("optimizer"))
    inner = attributes(optimizer.get("optimizer")) or optimizer
    if not inner.get("param_groups"):
        # Objects have shards too, so this is a list with one entry.
        shards = read_object(source, GROUP_OBJECT)
        inner = attributes(shards[0]) if isinstance(shards, list) and shards else {}
    steps = steps_of(inner)
    if steps < 1:
        raise CheckpointError(f"{source}: the optimizer's param_groups record no step", REMEDY)
    return steps


def refuse_absent(tensors: Mapping[str, Lazy], source: Path) -> None:
    """Raise an InputError that describes the state in the folder, because it cannot be read."""
    others = [key for key in tensors if "optimizer" in key]
    if not others:
        raise InputError(f"{source}: contains no optimizer state", "leave out --state")
    problem = f"{source}: {others[0]} and {len(others) - 1} more belong to an unknown optimizer"
    raise CheckpointError(problem, REMEDY)


# -- rows of parameters -----------------------------------------------------------------------------------------------


def state_in_rows(
    tensors: Mapping[str, Lazy],
    weights: Mapping[str, Lazy],
    cuts: Mapping[str, Cut],
    arguments: Mapping[str, object],
    source: Path,
) -> dict[str, Tensors]:
    """Return masters (`param`) and averages by Megatron-core's names from rows; {} if there are no rows.

    `weights`: the whole model under these names. Each row is for a rank and stage, and for a piece of an interleaved
    stage.
    """
    rows: dict[tuple[int, int], dict[tuple[str, int], Tensors]] = {}
    for key, tensor in tensors.items():
        if match := ROW.fullmatch(key):
            buckets = rows.setdefault((int(match[1]), int(match[2])), {})
            buckets.setdefault((match[3], int(match[4])), {})[match[5]] = tensor
    if not rows:
        return {}
    size, stages = (
        _size(arguments, name) for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    )
    pieces = 1 + max(piece for _, piece in rows)
    if len(rows) != size * stages * pieces or sorted(rows) != [
        (rank, piece) for rank in range(size * stages) for piece in range(pieces)
    ]:
        problem = f"{source}: has rows of {len({rank for rank, _ in rows})} ranks"
        raise CheckpointError(
            f"{problem}; its args name {size} tensor parallel ranks and {stages} stages", REMEDY
        )
    layers = 1 + max(layer_of(name) or 0 for name in weights)
    if layers % (stages * pieces):
        problem = f"{source}: {layers} layers are not divisible by {stages * pieces} pieces"
        raise CheckpointError(f"{problem}, and the layers of each piece are not recorded", REMEDY)
    found: dict[str, dict[str, list[Lazy]]] = {kind: {} for kind in ("param", *MOMENTS)}
    for stage in range(stages):
        for piece in range(pieces):
            own = _of_piece(weights, piece * stages + stage, stages * pieces)
            for rank in range(size):
                buckets = rows[stage * size + rank, piece]
                parts = {name: part_of(weight, cuts[name], rank, size) for name, weight in own.items()}
                prefix = (
                    f"{source}: optimizer.distributed.dp_group_idx_{stage * size + rank}.gbuf_idx_{piece}"
                )
                placed = _placed(parts, [buckets[key] for key in sorted(buckets)], prefix)
                for kind, named in placed.items():
                    for name, tensor in named.items():
                        found[kind].setdefault(name, []).append(tensor)
    # The last stage has a copy of a tied table.
    return {
        kind: {name: joined(parts[:size], cuts[name]) for name, parts in named.items() if name in weights}
        for kind, named in found.items()
    }


def cuts_by_core(names: Mapping[str, str], cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Return how ranks divide Megatron-core's tensors; `names`: our names by Megatron-core's."""
    found = {}
    for core, ours in names.items():
        cut = cuts[ours]
        # In Megatron-core, the queries, key and value of a group are adjacent.
        found[core] = replace(cut, sections=()) if order_of(ours) is Rows.GROUPS else cut
    return {**found, OUTPUT: cuts.get("output.weight", cuts.get("tokens.weight", WHOLE))}


def _size(arguments: Mapping[str, object], name: str) -> int:
    value = arguments.get(name, 1)
    return value if type(value) is int and value > 0 else 1


def _of_piece(weights: Mapping[str, Lazy], at: int, pieces: int) -> Tensors:
    """Return the weights of one piece of the model, in the order of its modules."""
    layers = (1 + max(layer_of(name) or 0 for name in weights)) // pieces
    own = {
        name: weight
        for name, weight in weights.items()
        if (number := layer_of(name)) is not None and number // layers == at
    }
    outside = {name: weight for name, weight in weights.items() if layer_of(name) is None}
    first = {name: weight for name, weight in outside.items() if name.startswith("embedding.")}
    own |= first if at == 0 else {}
    if at == pieces - 1:
        own |= {name: weight for name, weight in outside.items() if name not in first}
        if pieces > 1 and OUTPUT not in own:
            own[OUTPUT] = weights[TABLE]
    return {name: own[name] for name in sorted(own, key=_order)}


def _order(name: str) -> tuple[int, int, int, str]:
    """Return a sort key that puts tensors into the order of Megatron-core's modules."""
    stem, _, leaf = name.rpartition(".")
    kind = int(leaf != "weight")
    if stem in TABLES:
        return (0, TABLES.index(stem), kind, name)
    number = layer_of(name)
    if number is None:
        return (2, int(name == OUTPUT), kind, name)
    part = with_layer(stem, 0).removeprefix("decoder.layers.0.")
    return (1, number * len(IN_ORDER) + (IN_ORDER.index(part) if part in IN_ORDER else 0), kind, name)


def _placed(parts: Mapping[str, Lazy], buckets: Sequence[Tensors], source: str) -> dict[str, Tensors]:
    """Return the tensors of a rank's piece from its rows, which contain them in reverse order.

    A weight that is not next in the order must be the only one that equals the masters at this place.
    """
    found: dict[str, Tensors] = {kind: {} for kind in ("param", *MOMENTS)}
    left = list(parts)[::-1]
    for at, rows in enumerate(buckets):
        if set(rows) != set(found) or len({row.shape for row in rows.values()}) > 1:
            raise CheckpointError(f"{source}: bucket {at} lacks masters or averages", REMEDY)
        end, masters = 0, rows["param"]
        while left and masters.rows - end > 0:
            name, start = _next(masters, end, left, parts)
            if not name:
                break
            end = start + prod(parts[name].shape)
            left.remove(name)
            for kind, row in rows.items():
                found[kind][name] = shaped(rows_of(row, start, end), parts[name].shape)
        if masters.rows - end >= ALIGNED:
            problem = (
                f"{source}: the numbers of bucket {at} from {end:,} on match no single weight of the model"
            )
            raise CheckpointError(problem, REMEDY)
    if left:
        raise CheckpointError(f"{source}: has no numbers of {left[0]}", REMEDY)
    return found


def _next(masters: Lazy, end: int, left: Sequence[str], parts: Mapping[str, Lazy]) -> tuple[str, int]:
    """Return the weight that begins after `end`, and where it begins; "" if there is none, or several fit."""
    for start in places(end):
        if is_at(masters, start, parts[left[0]]):
            return left[0], start
        fitting = [name for name in left if is_at(masters, start, parts[name])]
        if len(fitting) == 1:
            return fitting[0], start
    return "", 0
