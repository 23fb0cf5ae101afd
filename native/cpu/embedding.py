"""Rows of a table on a CPU. For the gradient, tokens are sorted by row, and each row is summed in fp32."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from native.compiled.library import load, why_not
from native.compiled.op import POINTER, SUFFIX, address, kernel, register, structure
from native.fallback import report_fallback

__all__ = ["describe", "embedding", "why_not"]


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in embedding.cpp."""

    _fields_ = structure(
        ("ids", "upstream", "out", "ends", "order"),
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "width")),
        ("threads", ctypes.c_int),
        ("level", ctypes.c_int),
    )


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return f"the gradient sorted by row, summed in fp32 ({load().describe()})"


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the row of `weight` for each id; the reference computes other types than fp32 and bf16."""
    if weight.dtype not in SUFFIX or weight.dim() != 2:
        report_fallback("embedding", "cpu", f"has no kernel for {weight.dtype}")
        return F.embedding(ids, weight)
    rows: Tensor = _FORWARD(ids, weight)
    return rows


def _forward(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


def _backward(upstream: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Return the gradient of the table; the ids are valid, because the forward pass has read their rows."""
    upstream, ids = upstream.contiguous(), ids.reshape(-1).to(torch.int64).contiguous()
    out = upstream.new_empty(rows, upstream.shape[-1])
    room = torch.empty(rows + ids.numel(), dtype=torch.int64)
    pointers = map(address, (ids, upstream, out, room, room[rows:]))
    sizes = (ids.numel(), rows, upstream.shape[-1])
    arguments = _Arguments(*pointers, *sizes, torch.get_num_threads(), load().level)
    kernel("native_embedding", upstream.dtype, POINTER)(ctypes.byref(arguments))
    return out


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
_FORWARD = register("embedding(Tensor ids, Tensor weight) -> Tensor", _forward, _rows, _keep, _gradient)
