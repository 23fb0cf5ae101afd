"""Dropout before a result is added to the residual stream, and the seeds of its masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import native
from native import reference

# The largest seed or counter.
LARGEST = 1 << 62


class Seeds:
    """The seeds of a model's masks; torch's generator draws them, and recomputation resets it.

    A captured pass takes them from `rows` on the device instead, which are drawn before each replay.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        # How many seeds were taken since the last `restart`.
        self.taken = 0

    def restart(self, rows: Tensor | None = None) -> None:
        """Count from 0, and take the seeds from `rows`, or draw them."""
        self.rows, self.taken = rows, 0

    def next(self, count: int) -> Tensor:
        """Return the next `count` seeds and counters, (count, 2)."""
        self.taken += count
        return drawn(count) if self.rows is None else self.rows[self.taken - count : self.taken]


def drawn(count: int) -> Tensor:
    """Return the next `count` seeds and counters of torch's generator, (count, 2); one by one they are the same."""
    return torch.randint(LARGEST, (count, 2))


def dropout_add(ops: native.Choice, x: Tensor, residual: Tensor, probability: float, seed: Tensor) -> Tensor:
    """Return residual + dropout(x); `seed` is one row of `Seeds.next`.

    The mask is not stored. If a device has no kernel for it, torch draws and stores the mask; on a CPU the reference
    drops the same numbers as the kernel.
    """
    is_slow = x.device.type != "cpu" and ops.dropout_add is reference.dropout_add
    if is_slow or x.dtype != residual.dtype:
        return residual + F.dropout(x, probability)
    return ops.dropout_add(x, residual, None, seed, probability)
