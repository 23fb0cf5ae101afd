"""What differs between the versions of torch that training supports, 2.6 and newer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_DIST: Any = dist
# Torch 2.13 gave this collective another name, and warns about the old one.
reduce_scatter: Any = getattr(_DIST, "reduce_scatter_single", None) or _DIST.reduce_scatter_tensor


def why_not_sharded() -> str:
    """Return why this torch cannot divide weights and sum their gradients, or ""."""
    from torch.distributed.fsdp import FSDPModule

    can = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    return "" if can else f"needs torch 2.8 or newer with the engine torch, and this is {torch.__version__}"
