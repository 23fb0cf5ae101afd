"""A matrix and its bias on a CPU: by a kernel of ours where torch's products are slower."""

from __future__ import annotations

from native.compiled.library import load
from native.compiled.op import register
from native.cpu.product import faster_types, least_sizes, product_, serves
from native.products import Kernel, linear, linear_op, offer

__all__ = ["describe", "linear"]


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    kinds = " and ".join(("fp32", "bf16")[: len(faster_types())])
    if not kinds:
        return "torch's products; ours are faster only on AMD's processors with AVX-512"
    return f"our kernel for large products in {kinds}, torch's for the others ({load().describe()})"


offer(Kernel(serves, product_, least_sizes, linear_op(register)))
