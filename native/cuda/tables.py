"""Tables of addresses, by which one launch of a kernel covers many tensors.

A program of such a kernel has one chunk of one tensor. The table has a row of addresses for each kind of tensor, such
as weights or gradients, and their lengths. The chunks follow from the lengths, so they are made once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from native.cuda.language import jit, tl

# How many numbers a program handles.
CHUNK = 16384
# Addresses that are multiples of this many bytes allow the widest loads.
WIDE = 16


@dataclass(frozen=True)
class Table:
    """The addresses and lengths of several rows of tensors, on their device."""

    addresses: Tensor
    """(rows, tensors)."""
    counts: Tensor
    """(tensors,): the length of each tensor; all tensors of a column are equally long."""
    owners: Tensor
    """(programs,): the tensor of each program."""
    chunks: Tensor
    """(programs,): the chunk of this tensor."""
    aligned: bool
    """Whether every address is a multiple of WIDE."""


def table_of(*rows: Sequence[Tensor]) -> Table:
    """Return the table of rows of contiguous tensors, which are all on one device; the copy to it is asynchronous."""
    device = rows[0][0].device
    counts = [x.numel() for x in rows[0]]
    addresses = [[x.data_ptr() for x in row] for row in rows]
    numbers = torch.tensor([*addresses, counts], pin_memory=device.type == "cuda")
    moved = numbers.to(device, non_blocking=True)
    owners, chunks = _chunks(tuple(counts), device)
    aligned = all(address % WIDE == 0 for row in addresses for address in row)
    return Table(moved[:-1], moved[-1], owners, chunks, aligned)


@lru_cache(maxsize=64)
def _chunks(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for each program its tensor and its chunk, (2, programs)."""
    pairs = [(owner, chunk) for owner, count in enumerate(counts) for chunk in range(-(-count // CHUNK))]
    return torch.tensor(pairs, dtype=torch.int32).t().contiguous().to(device)


def groups_of(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the positions of equal keys together, in the order of their first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def kind_of(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's name of a type."""
    return {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.int16: tl.int16,
    }[dtype]


@jit
def address(
    addresses_at: tl.tensor, row: tl.constexpr, tensors: tl.tensor, owner: tl.tensor, KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the pointer to tensor `owner` of a row."""
    at = tl.load(addresses_at + row * tensors + owner).to(tl.pointer_type(KIND))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at
