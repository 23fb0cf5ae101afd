"""The sum of squares of gradients on CUDA: one launch per type, and partial sums in fp32, added in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, tl
from native.cuda.tables import CHUNK, address, groups_of, kind_of, table_of
from native.reference import square_sum as plain

METHOD = "one launch per type, without fp32 copies"


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers, in fp32."""
    given = [x.contiguous() for x in tensors if x.numel()]
    if not given or not all(language.computes("square_sum", x) for x in given):
        return plain(tensors)
    partial = [_partial([given[i] for i in group]) for group in groups_of([x.dtype for x in given])]
    return torch.cat(partial).sum(dtype=torch.float64).float()


def _partial(given: Sequence[Tensor]) -> Tensor:
    """Return the sum of each chunk of tensors of one type."""
    first, table = given[0], table_of(given)
    sums = torch.empty(len(table.owners), dtype=torch.float32, device=first.device)
    with on_device(first):
        _square_sum[(len(sums),)](
            table.addresses,
            table.counts,
            table.owners,
            table.chunks,
            sums,
            len(given),
            KIND=kind_of(first.dtype),
            ALIGNED=table.aligned,
            CHUNK=CHUNK,
            BLOCK=blocks_for(first).flat,
        )
    return sums


@jit
def _square_sum(
    addresses_at: tl.tensor, counts_at: tl.tensor, owners_at: tl.tensor, chunks_at: tl.tensor,
    sums_at: tl.tensor, tensors: tl.tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners_at + program)
    first = tl.load(chunks_at + program).to(tl.int64) * CHUNK
    x_at = address(addresses_at, 0, tensors, owner, KIND, ALIGNED)
    count = tl.load(counts_at + owner)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, at < count, 0.0).to(tl.float32)
        total += x * x
    tl.store(sums_at + program, tl.sum(total, 0))
