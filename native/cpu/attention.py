"""Attention on a CPU by a kernel that never stores the scores, for every instruction set.

On a processor whose matrix products reach 400 GFLOP/s, torch's fused attention reaches 52 to 116 GFLOP/s.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from native.compiled.arguments import FLOAT, INT, POINTER, SIZE, function, structure
from native.compiled.library import attention_level, load
from native.compiled.op import SUFFIX, kernel, register
from native.fallback import report_fallback
from native.masks import EVERY_KEY, Dropout, Mask
from native.reference import attention as plain

# The ops' arguments for masks and dropout: window, documents, source, chance, state, first head and heads.
Rest = tuple[int, Tensor | None, Tensor | None, float, Tensor | None, int, int]


class _Span(ctypes.Structure):
    """The layout of `struct Span` in kernel.h."""

    _fields_ = structure((POINTER, "at"), (SIZE, "batch head row"))

    @classmethod
    def of(cls, x: Tensor) -> _Span:
        """Return the span of a tensor (batch, heads, rows, dim) whose last dimension is dense."""
        return cls(x.data_ptr(), *x.stride()[:3])


class _Hiding(ctypes.Structure):
    """The layout of `struct Hiding` in kernel.h."""

    _fields_ = structure(
        (POINTER, "documents source"),
        (SIZE, "window"),
        (ctypes.c_uint64, "seed"),
        (SIZE, "first_head all_heads"),
        (ctypes.c_uint32, "threshold"),
        (FLOAT, "grow"),
    )


class _Arguments(ctypes.Structure):
    """The layout of `struct AttentionArguments` in kernel.h."""

    _fields_ = structure(
        (_Span, "q k v out out_gradient dq dk dv"),
        (POINTER, "logs scratch"),
        (_Hiding, "hiding"),
        (SIZE, "batch heads groups queries keys dim scratch_size"),
        (FLOAT, "scale"),
        (INT, "causal threads chunks"),
    )


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    products = ("", "", ", products of bf16", ", products of bf16 by AMX")[attention_level()]
    return f"a kernel that stores no scores ({load().describe()}{products})"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    mask: Mask = EVERY_KEY,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return the attention; the reference computes queries that see no key, and types without a kernel."""
    if torch.is_autocast_enabled("cpu"):
        # Cast here, where autograd records it: inside the op, autocast could give two operands different types.
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    with torch.autocast("cpu", enabled=False):
        blind = causal and q.shape[-2] > k.shape[-2]
        if blind or q.dtype not in SUFFIX or q.dim() != 4 or v.shape != k.shape:
            reason = "has no kernel for queries that see no key" if blind else f"has no kernel for {q.dtype}"
            report_fallback("attention", "cpu", reason)
            return plain(q, k, v, causal, mask, dropout)
        fused, _ = _FORWARD(q, k, v, causal, *_rest(q, causal, mask, dropout))
        result: Tensor = fused
        return result


def _rest(q: Tensor, causal: bool, mask: Mask, dropout: Dropout | None) -> Rest:
    """Return the arguments of the ops for masks and dropout."""
    if not causal:
        mask = EVERY_KEY
    source = None if mask.source is None else mask.source.to(torch.int32).contiguous()
    documents = None if mask.documents is None else mask.documents.to(torch.int32).contiguous()
    if dropout is None:
        return mask.window, documents, source, 0.0, None, 0, 0
    heads = dropout.heads or q.shape[1]
    return mask.window, documents, source, dropout.chance, dropout.state, dropout.first_head, heads


def _results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the result, with memory order (batch, queries, heads, dim), and for the logarithms."""
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim).transpose(1, 2)
    return out, q.new_empty(batch, heads, queries, dtype=torch.float32)


def _gradients(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the gradients, with memory order (batch, rows, heads, dim)."""
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (_dense(x) for x in (q, k, v))
    out, logs = _results(q)
    _run((q, k, v, out), logs, causal, rest, None)
    return out, logs


def _backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    causal: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    upstream, q, k, v = (_dense(x) for x in (upstream, q, k, v))
    dq, dk, dv = _gradients(upstream, q, k, v)
    _run((q, k, v, out), logs, causal, rest, (upstream, dq, dk, dv))
    return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _hiding(
    window: int,
    documents: Tensor | None,
    source: Tensor | None,
    chance: float,
    state: Tensor | None,
    first_head: int,
    heads: int,
) -> _Hiding:
    addresses = (None if x is None else x.data_ptr() for x in (documents, source))
    if state is None:
        return _Hiding(*addresses, window)
    dropout = Dropout(chance, state)
    seed = int(state.item()) & (2**64 - 1)
    return _Hiding(*addresses, window, seed, first_head, heads, dropout.threshold, 1.0 / (1.0 - chance))


def _run(
    passed: tuple[Tensor, Tensor, Tensor, Tensor],
    logs: Tensor,
    causal: bool,
    rest: Rest,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    q, k, *_ = passed
    (batch, heads, queries, dim), (groups, keys) = q.shape, k.shape[1:3]
    backward = gradients is not None
    if not q.numel() or not k.numel():
        for x in gradients[1:] if gradients else passed[3:]:
            x.zero_()
        return
    # In the forward pass parts of the queries are independent; in the backward pass heads that share keys are not.
    limit = max(1, torch.get_num_threads())
    chunks = 1 if backward else min(-(-limit // (batch * heads)), -(-queries // 64))
    threads = min(limit, batch * (groups if backward else heads * chunks))
    size = function("native_attention_scratch", SIZE, SIZE, SIZE, SIZE, INT)(queries, keys, dim, backward)
    scratch = torch.empty(threads * size, dtype=torch.uint8)
    spans = [_Span.of(x) for x in (*passed, *(gradients or (q, q, q, q)))]
    numbers = (batch, heads, groups, queries, keys, dim, size, dim**-0.5, causal, threads, chunks)
    arguments = _Arguments(*spans, logs.data_ptr(), scratch.data_ptr(), _hiding(*rest), *numbers)
    run = kernel("native_attention", None, POINTER, INT, INT, INT)
    run(ctypes.byref(arguments), backward, q.dtype == torch.bfloat16, load().level)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the result and one number per query; the backward pass recomputes the scores."""
    q, k, v, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _gradient(ctx: Any, upstream: Tensor, _: None) -> tuple[Tensor | None, ...]:
    gradients = _BACKWARD(upstream, *ctx.saved_tensors, *ctx.rest)
    return (*gradients, *(None for _ in ctx.rest))


_REST = (
    "bool causal, int window, Tensor? documents, Tensor? source, float chance, Tensor? state, int first_head,"
    " int heads"
)
_BACKWARD = register(
    f"attention_backward(Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, {_REST})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _gradients,
)
_FORWARD = register(
    f"attention(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor, Tensor)",
    _forward,
    _results,
    _keep,
    _gradient,
)
