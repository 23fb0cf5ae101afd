"""Products of matrices on a CPU by a kernel of ours, for types that torch multiplies more slowly on this processor."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from native.compiled.arguments import FLOAT, INT, POINTER, SIZE, function, structure
from native.compiled.library import LibraryMissing, load
from native.compiled.op import SUFFIX, address, kernel, register

# Levels of the library; the second is AVX-512 without its instructions for bf16, in tests.
AVX512, WITHOUT_BF16 = 2, 4
# The least rows x columns x inner numbers: of smaller products, a call takes longer than the kernel saves.
LEAST = 1 << 21
# The least rows and columns: with fewer, copying the second matrix takes longer than the kernel saves.
LEAST_ROWS = 32
# The least of them for `linear`: of smaller products, the gradient in Python takes longer than the kernel saves.
LEAST_LINEAR = {torch.float32: 1 << 23, torch.bfloat16: 1 << 26}


class _Product(ctypes.Structure):
    """The layout of `struct Product` in product.cpp."""

    _fields_ = structure(
        (POINTER, "a b bias out space"),
        (SIZE, "m n k a_row a_column b_row b_column out_row"),
        (FLOAT, "scale"),
        (INT, "is_bf16 out_is_bf16 bias_is_bf16 adds threads"),
    )


@functools.cache
def _processor() -> tuple[int, bool]:
    """Return how many of fp32 and bf16 the kernel can multiply here, and whether it is faster than torch."""
    functions = load().functions
    return int(functions.native_product_level()), bool(functions.native_product_is_faster())


def types() -> tuple[torch.dtype, ...]:
    """Return the types that the kernel can multiply here."""
    try:
        level = load().level
    except LibraryMissing:
        return ()
    if level < AVX512:
        return ()
    return (torch.float32, torch.bfloat16)[: 1 if level == WITHOUT_BF16 else _processor()[0]]


def faster_types() -> tuple[torch.dtype, ...]:
    """Return the types that the kernel multiplies faster than torch here."""
    found = types()
    return found if found and _processor()[1] else ()


def is_faster(dtype: torch.dtype, m: int, n: int, k: int) -> bool:
    """Return whether the kernel computes a product of this type and these sizes faster than torch."""
    return m >= LEAST_ROWS and n >= LEAST_ROWS and m * n * k >= LEAST and dtype in faster_types()


def least_sizes(dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the least rows or columns and the least multiplications of `linear`; None if the kernel is not faster."""
    return (LEAST_ROWS, LEAST_LINEAR[dtype]) if dtype in faster_types() else None


def serves(a: Tensor, b: Tensor, out: Tensor | None = None) -> bool:
    """Return whether the kernel can write the product of `a` and `b` into `out`, and is faster than torch."""
    if a.dim() != 2 or b.dim() != 2 or a.device.type != "cpu" or b.dtype != a.dtype:
        return False
    (m, k), n = a.shape, b.shape[1]
    if not is_faster(a.dtype, m, n, k) or 1 not in a.stride() or 1 not in b.stride():
        return False
    if out is not None and (out.dtype not in SUFFIX or out.stride(1) != 1):
        return False
    # The kernel reads pairs of bf16 from the rows of `a` if these are contiguous.
    return a.dtype == torch.float32 or k % 2 == 0 or a.stride(1) != 1


def product_(
    out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, adds: bool = False, scale: float = 1.0
) -> None:
    """Write scale a b + bias into `out`, whose rows are contiguous, or add it; `serves` must be true."""
    _PRODUCT(out, a, b, bias, adds, scale)


def _product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, adds: bool, scale: float) -> None:
    (m, k), n = a.shape, b.shape[1]
    assert b.shape[0] == k > 0 and out.shape == (m, n) and out.stride(1) == 1, (a.shape, b.shape, out.shape)
    bias = None if bias is None else bias.contiguous()
    own = _Product(
        *map(address, (a, b, bias, out, None)),
        m,
        n,
        k,
        *_strides(a),
        *_strides(b),
        out.stride(0),
        scale,
        a.dtype == torch.bfloat16,
        out.dtype == torch.bfloat16,
        bias is not None and bias.dtype == torch.bfloat16,
        adds,
        max(1, torch.get_num_threads()),
    )
    room = function("native_product_space", SIZE, POINTER)(ctypes.byref(own))
    space = torch.empty(room, dtype=torch.uint8)
    own.space = address(space)
    kernel("native_product", None, POINTER)(ctypes.byref(own))


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides; if both are 1, that of the rows does not matter, but the kernel expects contiguous rows."""
    return (x.stride(0), 1) if x.stride(1) == 1 else (1, x.stride(1))


_PRODUCT = register(
    "product_(Tensor(a!) out, Tensor a, Tensor b, Tensor? bias, bool adds, float scale) -> ()",
    _product,
    lambda *_: None,
)
