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
    first, second = (_Turn.apply(x, cosines, sines, interleaved) for x in (q, k))  # type: ignore[no-untyped-call]
    return first, second


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
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        return _turned(x, cosines, sines, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return _turned(upstream, cosines, -sines, ctx.interleaved), None, None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cosines.shape[-1]
    angles = (
        each.repeat_interleave(2, -1) if interleaved else torch.cat((each, each), -1)
        for each in (cosines.to(x.dtype), sines.to(x.dtype))
    )
    mode = "interleave" if interleaved else "half"
    turned: Tensor = library.kernel("npu_rotary_mul")(x[..., :size], *angles, rotary_mode=mode)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)
