"""What differs between the versions of torch that training supports, 2.6 and newer, and between its backends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DIST: Any = dist
# Torch 2.13 gave these collectives other names, and warns about the old ones.
reduce_scatter: Any = getattr(_DIST, "reduce_scatter_single", None) or _DIST.reduce_scatter_tensor
all_gather: Any = getattr(_DIST, "all_gather_single", None) or _DIST.all_gather_into_tensor


class SumByGloo:
    """Sum a tensor over the ranks, each of which gets its share, by gloo.

    Torch's gloo has a reduce-scatter that gives every rank the whole sum first: twice the bytes, and twice the time.
    The ranks' numbers are added in the order of the ranks.
    """

    def __init__(self, whole: Tensor, own: Tensor, group: Any) -> None:
        """Start; `own` is the place of this rank's share, and may be a part of `whole`."""
        self.received, self.own = torch.empty_like(whole), own
        self.work = dist.all_to_all_single(self.received, whole, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the other ranks' numbers and add them."""
        self.work.wait()
        first, *others = self.received.view(-1, self.own.numel())
        for other in others[:-1]:
            first.add_(other)
        torch.add(first, others[-1], out=self.own)


def why_not_sharded() -> str:
    """Return why this torch cannot divide weights and sum their gradients, or ""."""
    from torch.distributed.fsdp import FSDPModule

    can = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    return "" if can else f"needs torch 2.8 or newer with the engine torch, and this is {torch.__version__}"
