"""Causal attention on a CPU: a kernel that never stores the scores, or matrix products over blocks of queries.

torch's fused attention reaches 52 to 116 GFLOP/s on a processor whose matrix product reaches 400. The
kernel needs AVX-512 (for bf16: AVX512-BF16). Elsewhere torch multiplies each block of queries only by the
keys that it sees.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.compiled import library as compiled
from native.compiled.library import NAMESPACE, load
from native.reference import attention as plain
from native.reference import future

# In queries. Of 64, 128, 256 and 512 this is the fastest or within 10 % of it, at 256 to 2,048 tokens in
# bf16 and fp32.
BLOCK = 128
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_LEVEL = {torch.float32: 1, torch.bfloat16: 2}


class _Span(ctypes.Structure):
    """The layout of `struct Span` in attention.cpp."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> _Span:
        """Return the span of a tensor (batch, heads, rows, dim) whose last dimension is dense."""
        return cls(x.data_ptr(), *x.stride()[:3])


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in attention.cpp."""

    _fields_ = (
        *((name, _Span) for name in ("q", "k", "v", "out", "out_gradient", "dq", "dk", "dv")),
        ("logs", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "dim", "scratch_size")),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int),
        ("threads", ctypes.c_int),
    )


def why_not() -> str:
    """Return an empty string: only torch is needed."""
    return ""


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    level = compiled.attention_level()
    if level == 2:
        return "a kernel that holds no scores (AVX-512 and its bf16 products)"
    blocks = f"causal blocks of {BLOCK} queries as matrix products"
    return f"in fp32 a kernel that holds no scores (AVX-512), in bf16 {blocks}" if level else blocks


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Compute attention; the reference computes queries that see no key, and types without a kernel."""
    if torch.is_autocast_enabled("cpu"):
        # Cast here, where autograd records it: inside, autocast could give two operands different types.
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    with torch.autocast("cpu", enabled=False):
        return _attention(q, k, v, causal)


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    blind = causal and q.shape[-2] > k.shape[-2]
    has_kernel = q.dtype in _LEVEL and compiled.attention_level() >= _LEVEL[q.dtype]
    if has_kernel and not blind and q.dim() == 4 and v.shape == k.shape:
        _register()
        fused: Tensor = _Fused.apply(q, k, v, causal)  # type: ignore[no-untyped-call]
        return fused
    if not causal or blind or q.shape[-2] <= BLOCK:
        return plain(q, k, v, causal)
    out: Tensor = _Causal.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
    """Keep the result and one number per query; the backward pass computes the scores again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, logs = torch.ops.clusterctl_native.attention(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.causal = causal
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dq, dk, dv = torch.ops.clusterctl_native.attention_backward(upstream, *ctx.saved_tensors, ctx.causal)
        return dq, dk, dv, None


@functools.cache
def _register() -> torch.library.Library:
    """Register the ops with torch, so that profilers show their names; keep the result as long as they are called."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("attention(Tensor q, Tensor k, Tensor v, bool causal) -> (Tensor, Tensor)")
    library.define(
        "attention_backward(Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, bool causal)"
        " -> (Tensor, Tensor, Tensor)"
    )
    library.impl("attention", _forward, "CPU")
    library.impl("attention", _results, "Meta")
    library.impl("attention_backward", _backward, "CPU")
    library.impl("attention_backward", _gradients, "Meta")
    return library


def _results(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the result, in memory (batch, queries, heads, dim), and for the logarithms."""
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim).transpose(1, 2)
    return out, q.new_empty(batch, heads, queries, dtype=torch.float32)


def _gradients(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the gradients, in memory (batch, rows, heads, dim)."""
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (_dense(x) for x in (q, k, v))
    out, logs = _results(q, k, v, causal)
    _run(q, k, v, out, logs, causal, None)
    return out, logs


def _backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    upstream, q, k, v = (_dense(x) for x in (upstream, q, k, v))
    dq, dk, dv = _gradients(upstream, q, k, v, out, logs, causal)
    _run(q, k, v, out, logs, causal, (upstream, dq, dk, dv))
    return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    causal: bool,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    batch, heads, queries, dim = q.shape
    keys, functions = k.shape[2], load().functions
    if not q.numel() or not k.numel():
        return
    threads = min(max(1, torch.get_num_threads()), batch * heads)
    size_of = functions.native_attention_scratch
    size_of.restype, size_of.argtypes = ctypes.c_int64, [*[ctypes.c_int64] * 3, ctypes.c_int]
    size = int(size_of(queries, keys, dim, gradients is not None))
    scratch = torch.empty(threads * size, dtype=torch.uint8)
    spans = [_Span.of(x) for x in (q, k, v, out, *(gradients or (q, q, q, q)))]
    numbers = (batch, heads, queries, keys, dim, size, dim**-0.5, causal, threads)
    arguments = _Arguments(*spans, logs.data_ptr(), scratch.data_ptr(), *numbers)
    functions[f"native_attention_{_SUFFIX[q.dtype]}"](ctypes.byref(arguments), int(gradients is not None))


class _Causal(torch.autograd.Function):
    """Attention in blocks of queries; forward keeps the probabilities of each block, half of the full square."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scaled = q * q.shape[-1] ** -0.5  # (batch, heads, queries, dim)
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        saved = []
        for start, end, seen in _blocks(q.shape[-2], k.shape[-2]):
            scores = scaled[..., start:end, :] @ k[..., :seen, :].transpose(-2, -1)
            corner = scores[..., seen - (end - start) :]
            corner.masked_fill_(future(end - start, end - start, q.device), float("-inf"))
            probabilities = torch.softmax(scores, dim=-1)  # (batch, heads, block, seen)
            out[..., start:end, :] = probabilities @ v[..., :seen, :]
            saved.append(probabilities)
        ctx.save_for_backward(scaled, k, v, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled, k, v, *saved = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(scaled), torch.zeros_like(k), torch.zeros_like(v)
        blocks = _blocks(scaled.shape[-2], k.shape[-2])
        for (start, end, seen), probabilities in zip(blocks, saved, strict=True):
            above = upstream[..., start:end, :]
            dv[..., :seen, :] += probabilities.transpose(-2, -1) @ above
            through = above @ v[..., :seen, :].transpose(-2, -1)
            scores = torch._softmax_backward_data(through, probabilities, -1, probabilities.dtype)
            dq[..., start:end, :] = scores @ k[..., :seen, :]
            dk[..., :seen, :] += scores.transpose(-2, -1) @ scaled[..., start:end, :]
        return dq.mul_(scaled.shape[-1] ** -0.5), dk, dv


def _blocks(queries: int, keys: int) -> list[tuple[int, int, int]]:
    """Return per block: first query, end of the queries (exclusive), and how many keys the last query sees."""
    past = keys - queries
    return [
        (start, min(start + BLOCK, queries), past + min(start + BLOCK, queries))
        for start in range(0, queries, BLOCK)
    ]
