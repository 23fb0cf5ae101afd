"""Add a bf16 tensor to an fp32 tensor on a CPU; torch makes an fp32 copy first."""

from __future__ import annotations

import torch
from torch import Tensor

from native.compiled.arguments import INT, POINTER, SIZE
from native.compiled.library import load
from native.compiled.op import kernel


def add_wide_(total: Tensor, x: Tensor) -> None:
    """Add a contiguous bf16 tensor to a contiguous fp32 tensor of the same shape."""
    assert total.dtype == torch.float32 and x.dtype == torch.bfloat16 and total.shape == x.shape
    assert total.is_contiguous() and x.is_contiguous()
    run = kernel("native_add_wide", None, POINTER, POINTER, SIZE, INT, INT)
    run(total.data_ptr(), x.data_ptr(), x.numel(), torch.get_num_threads(), load().level)
