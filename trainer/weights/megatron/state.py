"""The state of Megatron's optimizers: fp32 masters and AdamW's averages under the model's names.

There are three forms: torch's AdamW for fp32, the one for 16 bits with its masters, and the distributed optimizer,
whose numbers are rows of all parameters in a separate file. No file records the order in a row. It is the reverse of
the model's order; each parameter starts at a multiple of 64 numbers, or in older versions without gaps. A place is
accepted only if the master at this place equals the weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.part import MOMENTS
from trainer.errors import CheckpointError, InputError
from trainer.weights.files.torch_read import attributes, read_torch
from trainer.weights.files.torch_state import by_name, flat, masters_of, steps_of
from trainer.weights.lazy import Lazy, rows_of, shaped, stacked

DISTRIBUTED = "distrib_optim.pt"
MASTER = "param"
ALIGNED = 64
"""A parameter's place in a row is a multiple of this many numbers."""
COMPARED = 4096
"""How many numbers at both ends of a parameter are compared with the weight."""
NO_PARAMETERS = ("_extra_state", "inv_freq")
Tensors = dict[str, Lazy]


def with_state(document: Mapping[str, object], file: Path) -> tuple[Mapping[str, object], int]:
    """Return a rank's document with its masters as weights and with averages by the same names, and the steps taken."""
    pieces = {
        key: {name: tensor for name, tensor in flat(document[key], file) if not name.endswith(NO_PARAMETERS)}
        for key in _keys(document)
    }
    optimizer = _only(document.get("optimizer"), file)
    if optimizer is None:
        raise InputError(f"{file}: contains no optimizer state", "leave out --state")
    inner = attributes(optimizer.get("optimizer")) or optimizer
    rows = file.with_name(DISTRIBUTED)
    found = _distributed(pieces, rows) if rows.is_file() else _numbered(pieces, optimizer, inner, file)
    more = dict(document)
    for key, named in found.items():
        masters = named.pop(MASTER)
        more[key] = {**pieces[key], **masters}
        more |= {key.replace("model", moment, 1): tensors for moment, tensors in named.items()}
    return more, steps_of(inner)


def _keys(document: Mapping[str, object]) -> list[str]:
    """Return the keys of the pieces of the model on a rank, in their order."""
    return sorted(
        (key for key in document if re.fullmatch(r"model\d*", str(key))), key=lambda key: (len(key), key)
    )


def _only(found: object, file: Path) -> Mapping[str, object] | None:
    """Return the one optimizer; Megatron has a list of them where parts of a model have their own."""
    if isinstance(found, list):
        held = [entry for entry in found if attributes(entry)]
        if len(held) > 1:
            problem = f"{file}: has {len(held)} optimizers, each for a part of the model"
            raise InputError(problem, "leave out --state")
        found = held[0] if held else None
    return attributes(found) or None


# -- numbered parameters ------------------------------------------------------------------------------------------


def _numbered(
    pieces: Mapping[str, Tensors], optimizer: Mapping[str, object], inner: Mapping[str, object], file: Path
) -> dict[str, dict[str, Tensors]]:
    """Return masters and averages of each piece from an optimizer that identifies its parameters by number."""
    whole = {(key, name): tensor for key, piece in pieces.items() for name, tensor in piece.items()}
    labels = {f"{key}/{name}": tensor for (key, name), tensor in whole.items()}
    numbered = by_name({label: tensor.shape for label, tensor in labels.items()}, inner)
    if numbered is None:
        problem = f"{file}: the optimizer's parameters are not those of the model, or have no state"
        if inner.get("param_groups") and not inner.get("state"):
            problem = f"{file}: the distributed optimizer's state in {DISTRIBUTED} is missing"
        raise CheckpointError(problem, "leave out --state to import the weights alone")
    held = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    masters = masters_of(numbered.groups, held, labels)
    if masters is None:
        raise CheckpointError(f"{file}: the optimizer's fp32 copies do not equal the model's parameters")
    found: dict[str, dict[str, Tensors]] = {
        key: {MASTER: {}, **{moment: {} for moment in MOMENTS}} for key in pieces
    }
    for kind, tensors in ((MASTER, masters), *numbered.moments.items()):
        for label, tensor in tensors.items():
            key, _, name = label.partition("/")
            found[key][kind][name] = tensor
    return found


# -- the distributed optimizer --------------------------------------------------------------------------------------


def _distributed(pieces: Mapping[str, Tensors], file: Path) -> dict[str, dict[str, Tensors]]:
    """Return masters and averages of each piece from rows of all parameters."""
    document: Mapping[Any, Any] = _only(read_torch(file), file) or {}
    buffers = {key: value for key, value in document.items() if type(key) is int}
    if sorted(buffers) != list(range(len(pieces))):
        problem = f"{file}: has {len(buffers)} buffers of parameters, but the model has {len(pieces)} pieces"
        raise CheckpointError(problem, "leave out --state to import the weights alone")
    return {
        key: _from_rows(piece, _rows_of(attributes(buffers[at]), file), file)
        for at, (key, piece) in enumerate(pieces.items())
    }


def _rows_of(buffer: Mapping[Any, Any], file: Path) -> Tensors:
    """Return the rows of a buffer: masters and averages; in older versions each is a list."""
    if len(buffer) != 1:
        raise CheckpointError(f"{file}: parameters of {len(buffer)} types; only one is supported")
    own = attributes(next(iter(buffer.values())))
    rows = {}
    for kind in (MASTER, *MOMENTS):
        row = own.get(kind)
        given = row if isinstance(row, list) else [row]
        parts = [part for part in given if isinstance(part, Lazy) and len(part.shape) == 1]
        if not parts or len(parts) < len(given):
            raise CheckpointError(f"{file}: lacks the row {kind!r}")
        rows[kind] = stacked(parts)
    if len({row.shape for row in rows.values()}) > 1:
        raise CheckpointError(f"{file}: its rows have different lengths")
    return rows


def _from_rows(piece: Tensors, rows: Tensors, file: Path) -> dict[str, Tensors]:
    """Return the tensors of one piece of the model from the rows of its buffer."""
    found: dict[str, Tensors] = {kind: {} for kind in rows}
    end = 0
    for name, weight in reversed(piece.items()):
        count = prod(weight.shape)
        start = next((at for at in places(end) if is_at(rows[MASTER], at, weight)), None)
        if start is None:
            problem = f"{file}: {name} is not at the place where Megatron's distributed optimizer stores it"
            raise CheckpointError(problem, "leave out --state to import the weights alone")
        end = start + count
        for kind, row in rows.items():
            found[kind][name] = shaped(rows_of(row, start, end), weight.shape)
    if rows[MASTER].rows - end >= ALIGNED:
        problem = f"{file}: its rows have {rows[MASTER].rows - end:,} numbers that belong to no parameter"
        raise CheckpointError(problem, "leave out --state to import the weights alone")
    return found


def places(end: int) -> Iterator[int]:
    """Yield where a parameter may begin, if the parameter before it ends at `end`."""
    aligned = -(-end // ALIGNED) * ALIGNED
    yield aligned
    if aligned != end:
        yield end


def is_at(row: Lazy, start: int, weight: Lazy) -> bool:
    """Return whether the numbers from `start` on equal a weight, compared at both ends."""
    count = prod(weight.shape)
    if start + count > row.rows:
        return False
    each = max(1, prod(weight.shape[1:]))
    most = max(1, COMPARED // each)
    for first, last in {(0, min(most, weight.rows)), (max(0, weight.rows - most), weight.rows)}:
        master = row.read(start + first * each, start + last * each)
        if not torch.equal(master.to(weight.dtype), weight.read(first, last).reshape(-1)):
            return False
    return True
