"""Store an fp32 master as the rounded bf16 weight and a 16-bit remainder, and restore it bit for bit.

The weight is the master rounded to nearest, ties to even. The remainder is the distance of the master from the weight
in units of the master's last place: from -32,768 to 32,768. These are 65,537 distances, one more than 16 bits can
store. The largest distance, a tie that was rounded down, is also stored as -32,768, and marked by the sign of AdamW's
average of squares, which is otherwise never negative. A NaN is restored as a NaN, but not with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from native.update import AdamWStep

# How many numbers are handled at a time, so that temporary memory stays in the processor's caches.
PIECE = 1 << 17
_TIE = 1 << 15
_SIGN = -(1 << 31)


@torch.no_grad()
def split(master: Tensor, weight: Tensor, remainder: Tensor, square: Tensor) -> None:
    """Write the bf16 `weight` and the int16 `remainder` of a master; mark the sign of `square`."""
    parts = (x.view(-1).split(PIECE) for x in (master, weight, remainder, square))
    for own, low, rest, power in zip(*parts, strict=True):
        low.copy_(own)
        distance = own.view(torch.int32) - (low.view(torch.int16).int() << 16)
        distance.masked_fill_(own.isnan(), 0)
        # This wraps the largest distance to the smallest one.
        rest.copy_(distance.short())
        power.view(torch.int32).bitwise_or_((distance == _TIE).int() * _SIGN)


@torch.no_grad()
def join(weight: Tensor, remainder: Tensor, square: Tensor) -> Tensor:
    """Return the fp32 master of a weight and its remainder; remove the marks from `square`."""
    master = torch.empty_like(weight, dtype=torch.float32)
    parts = (x.view(-1).split(PIECE) for x in (master, weight, remainder, square))
    for own, low, rest, power in zip(*parts, strict=True):
        marks = power.view(torch.int32)
        bits = (low.view(torch.int16).int() << 16) + rest.int() + ((marks < 0).int() << 16)
        own.view(torch.int32).copy_(bits)
        marks.bitwise_and_(~_SIGN)
    return master


def joined_one_by_one(update: AdamWStep, kernel: Callable[[AdamWStep], None]) -> None:
    """Run `kernel`, which needs fp32 masters, tensor by tensor, so that only one master exists at a time."""
    for at, remainder in enumerate(update.remainders):
        weight, square = update.held[at], update.squares[at]
        master = weight if remainder is None else join(weight, remainder, square)
        single = replace(
            update,
            held=[master],
            gradients=[update.gradients[at]],
            averages=[update.averages[at]],
            squares=[square],
            lowered=[update.lowered[at]],
            decays=[update.decays[at]],
            remainders=(),
        )
        kernel(single)
        if remainder is not None:
            split(master, weight, remainder, square)
