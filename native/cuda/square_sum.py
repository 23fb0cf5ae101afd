"""The sum of squares for the gradient norm on CUDA: partial sums in fp32, added in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, tl
from native.cuda.language import why_not as why_not
from native.reference import square_sum as plain


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return language.describe("one pass over each tensor, without fp32 copies")


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers, in fp32."""
    given = [x for x in tensors if x.numel()]
    if not given or not all(language.computes("square_sum", x) for x in given):
        return plain(tensors)
    blocks = blocks_for(given[0])
    counts = [min(blocks.pieces, -(-x.numel() // blocks.flat)) for x in given]
    partial = torch.empty(sum(counts), dtype=torch.float32, device=given[0].device)
    for x, count, sums in zip(given, counts, partial.split(counts), strict=True):
        with on_device(x):
            _square_sum[(count,)](x.contiguous(), sums, x.numel(), count, BLOCK=blocks.flat)
    return partial.sum(dtype=torch.float64).float()


@jit
def _square_sum(
    x_at: tl.tensor, sums_at: tl.tensor, count: tl.tensor, programs: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(program.to(tl.int64) * BLOCK, count, programs * BLOCK):
        x = tl.load(x_at + start + lane, start + lane < count, 0.0).to(tl.float32)
        total += x * x
    tl.store(sums_at + program, tl.sum(total, 0))
