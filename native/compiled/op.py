"""Register ops with torch: schema, kernel for each device, shapes of the results, and gradient.

So torch.compile sees one node per op without a graph break, and profilers show the names of a CPU's ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from native.compiled.arguments import function
from native.compiled.library import NAMESPACE
from native.fallback import report_fallback

# The endings of the names of kernels.
SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}

# Others, such as the compiler's, need torch's dispatcher.
PLAIN = (Tensor, torch.nn.Parameter)

# torch removes the ops when the library object is deleted, so keep it as long as this module.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    schema: str,
    kernel: Callable[..., Any],
    results: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    *,
    devices: Sequence[str] = ("CPU",),
) -> Callable[..., Any]:
    """Register the op that `schema` declares; return a function that runs it.

    kernel: computes the op on each of `devices`, which are torch's dispatch keys. results: returns empty tensors with
    the shapes of the results. keep(ctx, inputs, output): saves tensors for `backward(ctx, *gradients)`, which returns
    the gradients of the inputs; a gradient is None for a result that the loss does not depend on. An op without
    `backward` has no gradient.

    On a GPU, plain tensors reach the kernel without torch's dispatcher, which takes 10 to 20 us to come back to Python;
    profilers then show the kernel, and not the op.
    """
    name = schema.partition("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for device in devices:
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(qualified, results, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    run = kernel
    if keep is not None and backward is not None:
        node = _function(name, kernel, keep, backward)
        torch.library.register_autograd(qualified, node.backward, setup_context=keep, lib=_LIBRARY)

        def run(*arguments: Any) -> Any:
            return (node.apply if torch.is_grad_enabled() else kernel)(*arguments)

    def call(*arguments: Any) -> Any:
        first = arguments[0]
        if torch.compiler.is_compiling() or type(first) not in PLAIN or first.is_meta:
            return op(*arguments)
        return run(*arguments)

    return call if "CUDA" in devices else op


def _function(
    name: str, kernel: Callable[..., Any], keep: Callable[..., None], backward: Callable[..., Any]
) -> Any:
    """Return the op for torch's autograd, with its name for profilers."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = kernel(*arguments)
        keep(ctx, arguments, output)
        return output

    def gradient(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{name} has no second derivative")
        return backward(ctx, *gradients)

    parts = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    return type(name, (torch.autograd.Function,), parts)


def computes(op: str, *tensors: Tensor) -> bool:
    """Return whether the kernels of `op` support these tensors; if not, report that the reference computes it."""
    first = tensors[0]
    types = {x.dtype for x in tensors}
    if first.dtype in SUFFIX and len(types) == 1 and all(x.shape == first.shape for x in tensors):
        return True
    report_fallback(op, "cpu", f"has no kernel for {' and '.join(sorted(map(str, types)))}")
    return False


@functools.cache
def kernel(name: str, dtype: torch.dtype | None, *types: Any) -> Callable[..., None]:
    """Return the compiled function `name` for `dtype` (None: there is only one) with arguments of `types`."""
    found: Callable[..., None] = function(name if dtype is None else f"{name}_{SUFFIX[dtype]}", None, *types)
    return found


def address(x: Tensor | None) -> int | None:
    """Return the address of the first number of `x`; None for None."""
    return None if x is None else x.data_ptr()
