"""Make Triton's interpreter compute with bf16 as GPUs do.

Its own conversion from fp32 cuts off the lower 16 bits; a GPU rounds to the nearest, ties to even. Its own product
takes the bits of bf16 for integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_original = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot


def _convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
    if (source, target) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(data).view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
        # Adding could turn a NaN into an infinity.
        return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16).reshape(data.shape)
    if (source, target) == (tl.bfloat16, tl.float32):
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).reshape(data.shape)
    return _original(data, source, target, mode)


def _wide(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle(
        _convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
    )


def _product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _wide(a), _wide(b), *rest)


def install() -> None:
    """Replace the interpreter's conversion and its product."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _product
