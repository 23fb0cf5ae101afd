"""Cross-entropy of logits with columns divided among ranks, on CUDA; one pass over the logits before the exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.cross_entropy import scale_
from native.cuda.language import jit, on_device, register, tl
from native.divided import IGNORED, divided_loss
from native.gradients import column_kernels
from native.reference import vocabulary_cross_entropy as plain
from native.vocabulary import VocabularyPart

METHOD = "one pass before the exchange, gradient in place"


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, part: VocabularyPart, smoothing: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """Return the mean loss; logits that need a gradient are overwritten with it, unless they are a leaf."""
    if not language.computes("vocabulary_cross_entropy", logits):
        return plain(logits, targets, part, smoothing, ignore_index)
    return divided_loss(logits, targets, part, smoothing, ignore_index, _KERNELS)


@jit
def _column_sums(
    logits_at: tl.tensor, columns_at: tl.tensor, numbers_at: tl.tensor, stride: tl.tensor, tokens: tl.tensor,
    own: tl.tensor, of_target: tl.tensor, of_all: tl.tensor, ALL: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * stride
    lane = tl.arange(0, BLOCK)
    target = tl.load(columns_at + row)
    # The largest logit so far, the sum of the exponentials of the distances to it, and the sum of logits.
    top = -float("inf")
    total = 0.0
    every = 0.0
    for start in range(0, own, BLOCK):
        inside = start + lane < own
        x = tl.load(logits_at + start + lane, inside, -float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        # Without a finite logit the distance would be infinity minus infinity.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        if ALL:
            every += tl.sum(tl.where(inside, x, 0.0), 0)
        top = higher
    wanted = 0.0
    if ALL:
        wanted = every * of_all
    if target >= 0:
        wanted += tl.load(logits_at + target).to(tl.float32) * of_target
    tl.store(numbers_at + row, top)
    tl.store(numbers_at + tokens + row, total)
    tl.store(numbers_at + 2 * tokens + row, wanted)


@jit
def _column_slopes(
    logits_at: tl.tensor, columns_at: tl.tensor, factors_at: tl.tensor, stride: tl.tensor, tokens: tl.tensor,
    columns: tl.tensor, own: tl.tensor, of_target: tl.tensor, of_all: tl.tensor,
    SKIP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * stride
    target = tl.load(columns_at + row)
    top = tl.load(factors_at + row)
    factor = tl.load(factors_at + tokens + row)
    share = tl.load(factors_at + 2 * tokens + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = column < tl.where(target == SKIP, 0, own)
    x = tl.load(logits_at + column, read, -float("inf")).to(tl.float32)
    slope = tl.exp(x - top) * factor - share * of_all - tl.where(column == target, share * of_target, 0.0)
    slope = tl.where(read, slope, 0.0)
    tl.store(logits_at + column, slope.to(logits_at.dtype.element_ty), column < columns)


def _sums(logits: Tensor, columns: Tensor, own: int, of_target: float, of_all: float) -> Tensor:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens, blocks = len(logits), blocks_for(logits)
    numbers = torch.empty(3, tokens, dtype=torch.float32, device=logits.device)
    size = min(blocks.columns, language.width_of(logits.shape[1]))
    given = (logits, columns, numbers, logits.stride(0), tokens, own, of_target, of_all)
    if tokens:
        with on_device(logits):
            _column_sums[(tokens,)](*given, ALL=of_all != 0, BLOCK=size, num_warps=blocks.warps(size))
    return numbers


def _slopes(
    logits: Tensor, columns: Tensor, factors: Tensor, own: int, of_target: float, of_all: float
) -> None:
    (tokens, width), blocks = logits.shape, blocks_for(logits)
    size = min(blocks.columns, language.width_of(width))
    given = (logits, columns, factors.contiguous(), logits.stride(0), tokens, width, own, of_target, of_all)
    if logits.numel():
        with on_device(logits):
            grid = (tokens, -(-width // size))
            _column_slopes[grid](*given, SKIP=IGNORED, BLOCK=size, num_warps=blocks.warps(size))


_KERNELS = column_kernels(register, _sums, _slopes, scale_)
