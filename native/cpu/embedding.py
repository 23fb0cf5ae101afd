"""Rows of a table on a CPU. For the gradient, tokens are sorted by row, and each row is summed in fp32."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.compiled.arguments import INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import SUFFIX, address, kernel, register
from native.fallback import report_fallback
from native.gradients import no_result


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in embedding.cpp."""

    _fields_ = structure(
        (POINTER, "ids upstream out ends order"), (SIZE, "tokens rows width"), (INT, "threads level adds")
    )


METHOD = "the gradient sorted by row, summed in fp32"


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the row of `weight` for each id; the reference computes other types than fp32 and bf16."""
    if weight.dtype not in SUFFIX or weight.dim() != 2:
        report_fallback("embedding", "cpu", f"has no kernel for {weight.dtype}")
        return F.embedding(ids, weight)
    rows: Tensor = _FORWARD(ids, weight)
    return rows


def tied_embedding(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `embedding`, and `weight` for its other use."""
    learned = torch.is_grad_enabled() and weight.requires_grad
    if not learned or weight.dtype not in SUFFIX or torch.compiler.is_compiling():
        return embedding(ids, weight), weight
    rows, other = _Tied.apply(ids, weight)  # type: ignore[no-untyped-call]
    return rows, other


class _Tied(torch.autograd.Function):
    """The rows and the table itself. Its backward pass gets both gradients together, and adds one to the other."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, of_other: Tensor | None) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        if upstream is None:
            return None, of_other
        if of_other is None or not of_other.is_contiguous():
            own = _BACKWARD(upstream, ids, ctx.rows)
            return None, own if of_other is None else own.add_(of_other)
        # Nothing else uses this gradient: it was computed for this function.
        _ADD(of_other, upstream, ids)
        return None, of_other


def _forward(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


def _backward(upstream: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Return the gradient of the table; the ids are valid, because the forward pass has read their rows."""
    out = upstream.new_empty(rows, upstream.shape[-1])
    _sum(out, upstream, ids, False)
    return out


def _add(out: Tensor, upstream: Tensor, ids: Tensor) -> None:
    _sum(out, upstream, ids, True)


def _sum(out: Tensor, upstream: Tensor, ids: Tensor, adds: bool) -> None:
    """Write the sum of each row's gradients into `out`, or add it to what is there."""
    upstream, ids = upstream.contiguous(), ids.reshape(-1).to(torch.int64).contiguous()
    rows, width = out.shape
    room = torch.empty(rows + ids.numel(), dtype=torch.int64)
    pointers = map(address, (ids, upstream, out, room, room[rows:]))
    sizes = (ids.numel(), rows, width)
    arguments = _Arguments(*pointers, *sizes, torch.get_num_threads(), load().level, adds)
    kernel("native_embedding", upstream.dtype, POINTER)(ctypes.byref(arguments))


def _rows(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


def _table(upstream: Tensor, ids: Tensor, rows: int) -> Tensor:
    return upstream.new_empty(rows, upstream.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight.shape[0]


def _gradient(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
    return None, _BACKWARD(upstream, *ctx.saved_tensors, ctx.rows)


_BACKWARD = register(
    "embedding_backward(Tensor upstream, Tensor ids, SymInt rows) -> Tensor", _backward, _table
)
_ADD = register("embedding_add_(Tensor(a!) out, Tensor upstream, Tensor ids) -> ()", _add, no_result)
_FORWARD = register("embedding(Tensor ids, Tensor weight) -> Tensor", _forward, _rows, _keep, _gradient)
