"""Matrices divided among the tensor parallel ranks: the first of a pair by its outputs, the second by its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from native import products
from trainer.model.cuts import Cut
from trainer.parallel.tensor import Parallel, column_linear


class Activate(Protocol):
    """A function of a matrix's input: of each number, or of pairs of numbers."""

    def __call__(self, inner: Tensor) -> Tensor: ...

    def gradient(self, inner: Tensor, upstream: Tensor) -> Tensor:
        """Return the gradient of `inner` from that of the result."""


@dataclass(frozen=True)
class Source:
    """How the backward pass computes a matrix's input again, which is then not stored."""

    stored: Tensor
    """A tensor that the graph stores anyway, such as the input of a norm."""
    compute: Callable[[Tensor], Tensor]
    """Takes the stored tensor and returns exactly the matrix's input."""


class ColumnLinear(nn.Module):
    """A matrix divided by outputs (columns): each rank has its part of each section of the result."""

    def __init__(self, inputs: int, sections: tuple[int, ...], parallel: Parallel, bias: bool = True) -> None:
        super().__init__()
        own = sum(sections) // parallel.size
        self.weight = nn.Parameter(torch.zeros(own, inputs))
        self.bias = nn.Parameter(torch.zeros(own)) if bias else None
        self.cuts = {"weight": Cut(0, sections), "bias": Cut(0, sections)}
        self.parallel = parallel

    def forward(self, x: Tensor, source: Source | None = None) -> Tensor:
        # With sequence parallel, only this rank's part of `x` is stored.
        if source is None or self.parallel.divides_sequence or not self.weight.requires_grad:
            return column_linear(x, self.weight, self.bias, self.parallel)
        given = self.parallel.enter(x), source.stored, self.weight, self.bias
        result: Tensor = _SourcedLinear.apply(*given, source.compute)  # type: ignore[no-untyped-call]
        return result


class RowLinear(nn.Module):
    """A matrix divided by inputs (rows): the ranks' results are summed, and the bias is added once."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs // parallel.size))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.cuts = {"weight": Cut(1), "bias": Cut(partial=True)}
        self.parallel = parallel

    def forward(self, x: Tensor, activation: Activate | None = None) -> Tensor:
        """Return the product with `x`, or with `activation(x)`, which the backward pass recomputes."""
        bias = self.bias if self.parallel.size == 1 else None
        if activation is None:
            own = products.linear(x, self.weight, bias)
        elif self.weight.requires_grad and x.dtype == self.weight.dtype:
            own = _ActivatedLinear.apply(x, self.weight, bias, activation)  # type: ignore[no-untyped-call]
        else:
            # Autocast copies the weight, and the graph keeps the copy. With a frozen weight the backward pass needs no
            # activations, so none are stored or recomputed.
            own = products.linear(activation(x), self.weight, bias)
        if self.parallel.size == 1:
            return own
        whole = self.parallel.leave(own)
        return whole if self.bias is None else whole + self.bias


class _SourcedLinear(torch.autograd.Function):
    """A linear layer that stores another tensor instead of its input, and computes the input again from it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(stored, weight)
        ctx.compute = compute
        return products.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        stored, weight = ctx.saved_tensors
        rows = upstream.flatten(0, -2)
        of_weight = products.mm(rows.t(), ctx.compute(stored).flatten(0, -2))
        of_input = products.mm(rows, weight).view(*upstream.shape[:-1], -1)
        return of_input, None, of_weight, rows.sum(0) if ctx.needs_input_grad[3] else None, None


class _ActivatedLinear(torch.autograd.Function):
    """A linear layer whose input is an activation: it stores the activation's input, which is needed anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activate) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.activation = activation
        return products.linear(activation(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = upstream.flatten(0, -2)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = products.mm(rows.t(), ctx.activation(x).flatten(0, -2))
        of_active = products.mm(rows, weight).view(*upstream.shape[:-1], -1)
        of_input = ctx.activation.gradient(x, of_active)
        return of_input, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None
