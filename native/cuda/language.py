"""Import Triton if it is installed, and find out why its kernels cannot run here.

Kernels are functions that Triton compiles for the GPU. With TRITON_INTERPRET=1 its interpreter runs them in Python on
tensors of any device: this is slow, but tests without a GPU whether their results are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from native.compiled.op import register as register_op
from native.fallback import report_fallback

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = [
    "TYPES",
    "computes",
    "interpreted",
    "jit",
    "on_device",
    "register",
    "rows_of",
    "tl",
    "why_not",
    "width_of",
]

# The first version with the philox, interpreter and offline compiler that these kernels need.
OLDEST = (3, 2)
# Triton supports no older GPUs, and these have no bf16.
CAPABILITY = (8, 0)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# The length of the widest row that a program keeps in registers.
WIDEST = 16384


def jit(kernel: Callable[..., Any]) -> Any:
    """Return `kernel` compiled by Triton; without Triton return it unchanged, and it must not be called."""
    return kernel if triton is None else triton.jit(kernel)


def _probe() -> None:
    """Do nothing, as a kernel."""


# Triton decides where a kernel is declared whether it compiles it; versions before 3.4 have no `knobs` to ask.
_PROBE = jit(_probe)


def register(schema: str, *parts: Callable[..., Any]) -> Callable[..., Any]:
    """Register an op with torch under `cuda_` and its name; on CPU tensors the interpreter runs it."""
    return register_op(f"cuda_{schema}", *parts, devices=("CUDA", "CPU"))


def interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels, on any device."""
    return triton is not None and not isinstance(_PROBE, triton.JITFunction)


def why_not() -> str:
    """Return why Triton's kernels cannot run here, or ""."""
    if triton is None:
        return "Triton is not installed; install the package triton"
    if _version(triton.__version__) < OLDEST:
        return f"Triton {triton.__version__} is too old; {'.'.join(map(str, OLDEST))} or newer is needed"
    return "" if interpreted() else _device_fault()


def _device_fault() -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip:
        return f"this torch is for ROCm {torch.version.hip}; the kernels are only tuned and tested for CUDA"
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        own, least = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        return f"{torch.cuda.get_device_name()} has compute capability {own}; Triton needs {least} or newer"
    return ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def describe(strength: str) -> str:
    """Return a backend's description: its strength, and what runs the kernel."""
    runner = "in Triton's interpreter, slowly" if interpreted() else f"Triton {triton.__version__}"
    return f"{strength} ({runner})"


def computes(op: str, x: Tensor, width: int = 0, types: Sequence[torch.dtype] = TYPES) -> bool:
    """Return whether the kernels support tensors like `x`; if not, report once that the reference computes `op`."""
    if x.dtype not in types:
        report_fallback(op, "cuda", f"has no kernel for {x.dtype}")
    elif width > WIDEST:
        report_fallback(op, "cuda", f"supports rows of at most {WIDEST:,} numbers, not {width:,}")
    else:
        return True
    return False


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context for launches on the device of `x`, because Triton launches on the current device."""
    return torch.cuda.device_of(x)


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return `x` as rows of contiguous columns, their number, their width, and how far they are apart.

    It is copied only if its layout needs it: rows may be apart, such as those of one half of a wider tensor.
    """
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    if x.is_contiguous():
        return x, rows, width, width
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(-1) == 1 or width == 1 else flat.contiguous()
    return flat, rows, width, flat.stride(0)


@functools.cache
def width_of(width: int) -> int:
    """Return the smallest power of two that is at least `width`, because Triton needs such block sizes."""
    return 1 << max(0, width - 1).bit_length()
