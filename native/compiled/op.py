"""Register ops with torch: schema, kernel for each device, shapes of the results, and gradient.

So torch.compile sees one node per op without a graph break, and profilers show the names of the ops.
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

# Others, such as the compiler's, need the dispatcher.
PLAIN = (Tensor, torch.nn.Parameter)

_BELOW = torch._C._after_autograd_keyset
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
    straight: bool = False,
) -> Callable[..., Any]:
    """Register the op that `schema` declares; return it.

    kernel: computes the op on each of `devices`, which are torch's dispatch keys. results: returns empty tensors with
    the shapes of the results. keep(ctx, inputs, output): saves tensors for `backward(ctx, *gradients)`, which returns
    the gradients of the inputs; a gradient is None for a result that the loss does not depend on. An op without
    `backward` has no gradient. straight: plain tensors reach the kernel without torch's dispatcher, which takes 10 to
    20 us to come back to Python; profilers then show the kernel alone.
    """
    name = schema.partition("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for device in devices:
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(qualified, results, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    run = None
    if keep is not None and backward is not None:
        run = _with_gradient(op, kernel, keep, backward, devices)
        _LIBRARY.impl(name, run, "Autograd", with_keyset=True)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or type(arguments[0]) not in PLAIN:
            return op(*arguments)
        return kernel(*arguments) if run is None else run(None, *arguments)

    return call if straight else op


def _with_gradient(
    op: Any,
    kernel: Callable[..., Any],
    keep: Callable[..., None],
    backward: Callable[..., Any],
    devices: Sequence[str],
) -> Callable[..., Any]:
    """Return the function that computes the op for autograd.

    It does the same as `torch.library.register_autograd`, which takes 4 us more per call: this function does not use
    torch's dispatcher a second time to find the kernel for plain tensors.
    """
    direct = tuple(getattr(torch._C.DispatchKey, device) for device in devices)

    def compute(keyset: Any, arguments: tuple[Any, ...]) -> Any:
        if keyset is None or (keyset & _BELOW).highestPriorityTypeId() in direct:
            return kernel(*arguments)
        return op.redispatch(keyset & _BELOW, *arguments)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = compute(keyset, arguments)
            keep(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            if torch.is_grad_enabled():
                raise RuntimeError(f"{op} has no second derivative")
            found = backward(ctx, *gradients)
            return (None, *found) if isinstance(found, tuple) else (None, found)

    def run(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled():
            return Function.apply(keyset, *arguments)  # type: ignore[no-untyped-call]
        with torch._C._AutoDispatchBelowAutograd():
            return compute(keyset, arguments)

    return run


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
