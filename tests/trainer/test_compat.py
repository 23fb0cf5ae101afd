"""What differs between versions of torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from trainer import compat


def test_the_collective_has_the_name_that_this_torch_does_not_warn_about() -> None:
    newer = hasattr(dist, "reduce_scatter_single")
    assert compat.reduce_scatter.__name__ == ("reduce_scatter_single" if newer else "reduce_scatter_tensor")


def test_a_torch_that_cannot_divide_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    if hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        assert compat.why_not_sharded() == ""
        monkeypatch.delattr(FSDPModule, "set_force_sum_reduction_for_comms")
    assert compat.why_not_sharded() == "needs torch 2.8 or newer with the engine torch, and this is 2.6.0"
