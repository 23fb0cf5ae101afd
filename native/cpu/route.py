"""Routing of tokens to experts on a CPU: softmax, the largest probabilities and their weights in one pass each way."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from native import reference
from native.compiled.arguments import INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import SUFFIX, address, kernel, register
from native.fallback import report_fallback


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in route.cpp."""

    _fields_ = structure(
        (POINTER, "logits chances weights chosen of_chances of_weights out scratch"),
        (SIZE, "tokens experts top_k"),
        (INT, "renormalize threads level"),
    )


METHOD = "softmax and top-k in one pass"


def route(logits: Tensor, top_k: int, renormalize: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, weights and expert numbers; the reference computes types other than fp32 and bf16."""
    if logits.dtype not in SUFFIX:
        report_fallback("route", "cpu", f"has no kernel for {logits.dtype}")
        return reference.route(logits, top_k, renormalize)
    if not 0 < top_k <= logits.shape[-1]:
        raise ValueError(f"route takes 1 to {logits.shape[-1]} experts per token, not {top_k}")
    made: tuple[Tensor, Tensor, Tensor] = _FORWARD(logits, top_k, renormalize)
    return made


def _forward(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.contiguous()
    out = _results(logits, top_k)
    _run("native_route", logits.dtype, logits, *out, None, None, None, renormalize=renormalize)
    return out


def _backward(
    chances: Tensor,
    chosen: Tensor,
    of_chances: Tensor | None,
    of_weights: Tensor | None,
    renormalize: bool,
    dtype: torch.dtype,
) -> Tensor:
    above = (None if each is None else each.contiguous() for each in (of_chances, of_weights))
    out = torch.empty_like(chances, dtype=dtype)
    _run("native_route_backward", dtype, None, chances, None, chosen, *above, out, renormalize=renormalize)
    return out


def _run(
    name: str,
    dtype: torch.dtype,
    logits: Tensor | None,
    chances: Tensor,
    weights: Tensor | None,
    chosen: Tensor,
    *rest: Tensor | None,
    renormalize: bool,
) -> None:
    (tokens, experts), threads = chances.shape, torch.get_num_threads()
    scratch = torch.empty(threads, 2, -(-experts // 16) * 16)
    pointers = map(address, (logits, chances, weights, chosen, *rest, scratch))
    sizes = (tokens, experts, chosen.shape[1])
    arguments = _Arguments(*pointers, *sizes, renormalize, threads, load().level)
    kernel(name, dtype, POINTER)(ctypes.byref(arguments))


def _results(logits: Tensor, top_k: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens = logits.shape[0]
    chances = logits.new_empty(logits.shape, dtype=torch.float32)
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    return chances, weights, logits.new_empty(tokens, top_k, dtype=torch.int64)


def _slope(chances: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(chances, dtype=rest[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, ctx.renormalize = inputs
    chances, _, chosen = output
    ctx.mark_non_differentiable(chosen)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(chances, chosen)
    ctx.dtype = logits.dtype


def _gradient(
    ctx: Any, of_chances: Tensor | None, of_weights: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    chances, chosen = ctx.saved_tensors
    return _BACKWARD(chances, chosen, of_chances, of_weights, ctx.renormalize, ctx.dtype), None, None


_BACKWARD = register(
    "route_backward(Tensor chances, Tensor chosen, Tensor? of_chances, Tensor? of_weights, bool renormalize, "
    "ScalarType dtype) -> Tensor",
    _backward,
    _slope,
)
_FORWARD = register(
    "route(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor, Tensor)",
    _forward,
    _results,
    _keep,
    _gradient,
)
