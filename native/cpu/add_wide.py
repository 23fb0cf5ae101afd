"""Add a bf16 tensor to an fp32 tensor on a CPU; torch makes an fp32 copy first."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.compiled.library import load


def add_wide_(total: Tensor, x: Tensor) -> None:
    """Add a contiguous bf16 tensor to a contiguous fp32 tensor of the same shape."""
    assert total.dtype == torch.float32 and x.dtype == torch.bfloat16 and total.shape == x.shape
    assert total.is_contiguous() and x.is_contiguous()
    library = load()
    library.functions.native_add_wide(
        ctypes.c_void_p(total.data_ptr()),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.numel()),
        torch.get_num_threads(),
        library.level,
    )
