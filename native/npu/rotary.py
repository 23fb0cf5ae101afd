"""Rotary positions of queries and keys on Ascend NPUs by CANN's npu_rotary_mul.

The gradient uses the same kernel with negative sines. torch_npu's own derivative would store queries and keys for the
gradients of the angles, which are not needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.fallback import report_fallback
from native.npu import library
from native.reference import rotary as plain

# The smallest size that the kernel does not support.
WIDTH, SIZE = 896, 1000

NEEDS = ("npu_rotary_mul",)
METHOD = "CANN's npu_rotary_mul"


def rotary(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys; the reference computes what the kernel does not support."""
    fault = next(filter(None, (_fault(x, cosines, interleaved) for x in (q, k))), "")
    if fault:
        report_fallback("rotary", "npu", fault)
    if fault or not all(library.computes("rotary", x, "npu_rotary_mul") for x in (q, k)):
        return plain(q, k, cosines, sines, interleaved)
    result: tuple[Tensor, Tensor] = _Turn.apply(q, k, cosines, sines, interleaved)  # type: ignore[no-untyped-call]
    return result


def _fault(x: Tensor, cosines: Tensor, interleaved: bool) -> str:
    """Return why the kernel does not support x (batch, heads, rows, dim), or ""."""
    batch, heads = x.shape[:2]
    if 2 * cosines.shape[-1] >= WIDTH:
        return f"rotates fewer than {WIDTH} numbers of a head, not {2 * cosines.shape[-1]}"
    if interleaved and len(cosines) > 1:
        return "needs the same angles for all samples if pairs are interleaved"
    if (batch * heads if interleaved else max(batch, heads)) >= SIZE:
        return f"supports fewer than {SIZE} samples and heads, not {batch} and {heads}"
    return ""


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        return _turned((q, k), cosines, sines, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return *_turned(upstream, cosines, -sines, ctx.interleaved), None, None, None


def _turned(
    parts: tuple[Tensor, ...], cosines: Tensor, sines: Tensor, interleaved: bool
) -> tuple[Tensor, ...]:
    """Return queries and keys rotated by the same angles, which are widened once for both."""
    angles = tuple(
        each.repeat_interleave(2, -1) if interleaved else torch.cat((each, each), -1)
        for each in (cosines.to(parts[0].dtype), sines.to(parts[0].dtype))
    )
    return tuple(_by_kernel(x, angles, "interleave" if interleaved else "half") for x in parts)


def _by_kernel(x: Tensor, angles: tuple[Tensor, ...], mode: str) -> Tensor:
    if library.by_rows(x):
        rows, *own = (each.transpose(1, 2) for each in (x, *angles))
        return _by_kernel(rows, tuple(own), mode).transpose(1, 2)
    size = angles[0].shape[-1]
    turned: Tensor = library.kernel("npu_rotary_mul")(x[..., :size], *angles, rotary_mode=mode)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)
