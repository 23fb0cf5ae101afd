"""Layer norm and RMS norm on CUDA, with or without the addition of a residual before; sums are in fp32.

A program has whole rows in registers, so that each pass reads a row once. The gradients of weight and bias are summed
in a fixed order: a program sums its rows, then the programs' sums are added. If rows are too wide to keep these sums in
registers too, the rows are read a second time for the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native import reference
from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, register, rows_of, tl, width_of
from native.gradients import norm_ops

METHOD = "each pass reads a row once, sums in fp32"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Return the layer norm of `x`."""
    if not language.computes("layer_norm", x, x.shape[-1]):
        return reference.layer_norm(x, weight, bias, eps)
    result: Tensor = _LAYER(x, None, weight, bias, eps)[0]
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the RMS norm of `x`."""
    if not language.computes("rms_norm", x, x.shape[-1]):
        return reference.rms_norm(x, weight, eps)
    result: Tensor = _RMS(x, None, weight, None, eps)[0]
    return result


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their type, and its layer norm."""
    if not _adds(x, residual) or not language.computes("add_layer_norm", x, x.shape[-1]):
        return reference.add_layer_norm(x, residual, weight, bias, eps)
    out, total, _ = _LAYER(x, residual, weight, bias, eps)
    return total, out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their type, and its RMS norm."""
    if not _adds(x, residual) or not language.computes("add_rms_norm", x, x.shape[-1]):
        return reference.add_rms_norm(x, residual, weight, eps)
    out, total, _ = _RMS(x, residual, weight, None, eps)
    return total, out


def _adds(x: Tensor, residual: Tensor) -> bool:
    """Return whether a kernel adds tensors of these types; the gradient's kernels know only one type."""
    return x.dtype == residual.dtype or not torch.is_grad_enabled()


@jit
def _normalise(
    x_at: tl.tensor, residual_at: tl.tensor, weight_at: tl.tensor, bias_at: tl.tensor, out_at: tl.tensor,
    total_at: tl.tensor, facts_at: tl.tensor, rows: tl.tensor, width: tl.tensor,
    x_stride: tl.tensor, residual_stride: tl.tensor, eps: tl.tensor, CENTRE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    x = tl.load(x_at + row[:, None] * x_stride + column[None, :], inside, 0.0)
    if RESIDUAL:
        residual = tl.load(residual_at + row[:, None] * residual_stride + column[None, :], inside, 0.0)
        # Round before the norm, because the backward pass only has the rounded sum.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(total_at.dtype.element_ty)
        tl.store(total_at + at, x, inside)
    x = x.to(tl.float32)
    if CENTRE:
        mean = tl.sum(x, 1) / width
        tl.store(facts_at + row, mean, row < rows)
        facts_at += rows
        x = tl.where(inside, x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(facts_at + row, inverse, row < rows)
    weight = tl.load(weight_at + column, column < width, 0.0).to(tl.float32)
    out = x * inverse[:, None] * weight[None, :]
    if BIAS:
        out += tl.load(bias_at + column, column < width, 0.0).to(tl.float32)[None, :]
    tl.store(out_at + at, out.to(out_at.dtype.element_ty), inside)


@jit
def _derive(
    upstream_at: tl.tensor, extra_at: tl.tensor, x_at: tl.tensor, weight_at: tl.tensor,
    facts_at: tl.tensor, out_at: tl.tensor, sums_at: tl.tensor, rows: tl.tensor, width: tl.tensor,
    upstream_stride: tl.tensor, x_stride: tl.tensor, piece: tl.tensor,
    CENTRE: tl.constexpr, BIAS: tl.constexpr, EXTRA: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    inverses_at = facts_at + rows if CENTRE else facts_at
    program = tl.program_id(0).to(tl.int64)
    first = program * piece
    last = tl.minimum(first + piece, rows)
    column = tl.arange(0, WIDTH)
    weight = tl.load(weight_at + column, column < width, 0.0).to(tl.float32)[None, :]
    weight_sums = tl.zeros([ROWS, WIDTH], tl.float32)
    bias_sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < width)[None, :]
        slope = tl.load(upstream_at + row[:, None] * upstream_stride + column[None, :], inside, 0.0).to(
            tl.float32
        )
        x = tl.load(x_at + row[:, None] * x_stride + column[None, :], inside, 0.0).to(tl.float32)
        inverse = tl.load(inverses_at + row, row < last, 0.0)[:, None]
        if CENTRE:
            x = tl.where(inside, x - tl.load(facts_at + row, row < last, 0.0)[:, None], 0.0)
        normal = x * inverse
        if SUMS:
            weight_sums += slope * normal
            if BIAS:
                bias_sums += slope
        slope *= weight
        out = slope - normal * (tl.sum(slope * normal, 1)[:, None] / width)
        if CENTRE:
            out -= tl.sum(slope, 1)[:, None] / width
        out *= inverse
        at = row * width
        if EXTRA:
            out += tl.load(extra_at + at[:, None] + column[None, :], inside, 0.0).to(tl.float32)
        tl.store(out_at + at[:, None] + column[None, :], out.to(out_at.dtype.element_ty), inside)
    if SUMS:
        sums_at += program * width
        tl.store(sums_at + column, tl.sum(weight_sums, 0), column < width)
        if BIAS:
            sums_at += tl.num_programs(0) * width
            tl.store(sums_at + column, tl.sum(bias_sums, 0), column < width)


@jit
def _sum_columns(
    upstream_at: tl.tensor, x_at: tl.tensor, facts_at: tl.tensor, sums_at: tl.tensor, rows: tl.tensor,
    width: tl.tensor, upstream_stride: tl.tensor, x_stride: tl.tensor, piece: tl.tensor, CENTRE: tl.constexpr,
    BIAS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    inverses_at = facts_at + rows if CENTRE else facts_at
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    weight_sums = tl.zeros([WIDTH], tl.float32)
    bias_sums = tl.zeros([WIDTH], tl.float32)
    for row in range(program * piece, tl.minimum(program * piece + piece, rows)):
        slope = tl.load(upstream_at + row * upstream_stride + column, inside, 0.0).to(tl.float32)
        x = tl.load(x_at + row * x_stride + column, inside, 0.0).to(tl.float32)
        if CENTRE:
            x -= tl.load(facts_at + row)
        weight_sums += slope * (x * tl.load(inverses_at + row))
        bias_sums += slope
    sums_at += program * width
    tl.store(sums_at + column, weight_sums, inside)
    if BIAS:
        tl.store(sums_at + tl.num_programs(0) * width + column, bias_sums, inside)


def _forward(
    made: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
) -> None:
    out, total, facts = made
    flat, rows, width, stride = rows_of(x)
    other, _, _, apart = rows_of(x if residual is None else residual)
    wide, blocks = width_of(width), blocks_for(x)
    held = blocks.rows(wide)
    if rows and width:
        with on_device(x):
            _normalise[(-(-rows // held),)](
                flat,
                other,
                weight.contiguous(),
                weight if bias is None else bias.contiguous(),
                out,
                out if residual is None else total,
                facts,
                rows,
                width,
                stride,
                apart,
                eps,
                CENTRE=centre,
                BIAS=bias is not None,
                RESIDUAL=residual is not None,
                ROWS=held,
                WIDTH=wide,
                num_warps=blocks.warps(held * wide),
            )


def _backward(
    upstream: Tensor,
    of_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    facts: Tensor,
    learned: bool,
    biased: bool,
    centre: bool,
) -> tuple[Tensor, Tensor]:
    flat, rows, width, stride = rows_of(x)
    slopes, _, _, apart = rows_of(upstream)
    wide, blocks = width_of(width), blocks_for(x)
    held = blocks.rows(wide)
    piece = -(-max(1, rows) // blocks.pieces)
    pieces = -(-rows // piece)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = torch.empty(2 if biased else 1, pieces, width, dtype=torch.float32, device=x.device)
    at_once = wide <= blocks.widest_sums
    shape = (rows, width, apart, stride, piece)
    # Without rows there are no pieces, whose sum is 0.
    if rows and width:
        with on_device(x):
            _derive[(pieces,)](
                slopes,
                out if of_total is None else of_total.contiguous(),
                flat,
                weight.contiguous(),
                facts,
                out,
                sums,
                *shape,
                CENTRE=centre,
                BIAS=biased,
                EXTRA=of_total is not None,
                SUMS=at_once,
                ROWS=held,
                WIDTH=wide,
                num_warps=blocks.warps(held * wide),
            )
            if not at_once:
                grid = (pieces, -(-width // blocks.flat))
                _sum_columns[grid](
                    slopes, flat, facts, sums, *shape, CENTRE=centre, BIAS=biased, WIDTH=blocks.flat
                )
    return out, sums.sum(1) if learned else x.new_empty(0, dtype=torch.float32)


_LAYER, _RMS = norm_ops(register, _forward, _backward)
