"""Tensor and sequence parallel: the exchanges within a pass between ranks that share every layer.

A pair of matrices needs two exchanges: the first matrix is cut by outputs (columns), the second by inputs (rows), so
only the gradient of the pair's input and the pair's result must be summed. Sequence parallel moves the same number of
bytes but divides the sum along the sequence, so that norms and dropout between the pairs are divided too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from native import products
from trainer.compat import reduce_scatter

# The dimension of (batch, sequence, hidden) that sequence parallel divides.
SEQUENCE = 1


@dataclass(frozen=True)
class Parallel:
    """This rank's place in its tensor parallel group; by default a single rank."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """Torch's process group of these ranks."""
    sequence: bool = False
    """Whether activations between the matrices are divided along the sequence."""

    @property
    def divides_sequence(self) -> bool:
        return self.sequence and self.size > 1

    def enter(self, x: Tensor) -> Tensor:
        """Return `x`, which all ranks have, as input for matrices cut by columns; the backward pass sums its gradient.

        With sequence parallel use `column_linear`.
        """
        return x if self.size == 1 else exchanged(x, lambda x: x.view_as(x), self._summed)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks after a matrix cut by rows; with sequence parallel, this rank's part of it."""
        if self.size == 1:
            return x
        if self.sequence:
            return exchanged(x, self.scatter_sum, self.gather)
        return exchanged(x, self._summed, lambda upstream: upstream)

    def own(self, x: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return this rank's part of `x`, which all ranks have; the backward pass gathers the gradient."""
        if self.size == 1:
            return x

        def part(x: Tensor) -> Tensor:
            return x.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)

        return exchanged(x, part, partial(self.gather, dim=dim))

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' parts concatenated along `dim`; the backward pass sums the gradient of each part."""
        if self.size == 1:
            return x
        return exchanged(x, partial(self.gather, dim=dim), partial(self.scatter_sum, dim=dim))

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place and return it; no gradient."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def shared_sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, which each of them uses: the backward pass sums its gradient too."""
        return exchanged(x, self._summed, self._summed)

    def _summed(self, x: Tensor) -> Tensor:
        return self.sum(x.clone(memory_format=torch.contiguous_format))

    def sum_all(self, parts: Sequence[Tensor]) -> None:
        """Sum tensors over the ranks in place, with one exchange; no gradient."""
        # There may be none, for example on a pipeline stage without a layer.
        if not parts:
            return
        whole = self.sum(torch.cat([part.flatten() for part in parts]))
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def largest(self, x: Tensor) -> Tensor:
        """Replace `x` by the maximum over the ranks and return it; no gradient."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def gather(self, part: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return the ranks' parts concatenated along `dim`; no gradient."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def stacked(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, all of one shape, as (ranks, ...); no gradient."""
        return self.gather(x.unsqueeze(0), 0)

    def scatter_sum(self, x: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks; no gradient."""
        if self.size == 1:
            return x
        parts = torch.cat([part.flatten() for part in x.chunk(self.size, dim)])
        shape = list(x.shape)
        shape[dim] //= self.size
        out = x.new_empty(shape)
        reduce_scatter(out.view(-1), parts, group=self.group)
        return out


ALONE = Parallel()


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel) -> Tensor:
    """Return this rank's columns of a linear layer applied to the whole `x`.

    With sequence parallel, `x` is this rank's part of the sequence. Only this part is stored for the backward pass; it
    gathers the whole input again. The graph stores 1/size of what `F.linear` of the gathered input would store.
    """
    if not parallel.divides_sequence:
        return products.linear(parallel.enter(x), weight, bias)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return _apply(_GatheredLinear, x, weight.to(dtype), bias, parallel)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel) -> Tensor:
        part = x.to(weight.dtype)
        ctx.save_for_backward(part, weight)
        ctx.parallel, ctx.dtype, ctx.has_bias = parallel, x.dtype, bias is not None
        return products.linear(parallel.gather(part), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        rows = upstream.flatten(0, -2)  # (batch x sequence, own columns)
        of_input = of_weight = None
        if needs_weight:
            of_weight = products.mm(rows.t(), ctx.parallel.gather(part).flatten(0, -2))
        if needs_input:
            # Sum in the type of the input, as in an exchange of the gathered input's gradient.
            own = products.mm(rows, weight).view(*upstream.shape[:-1], -1)
            of_input = ctx.parallel.scatter_sum(own.to(ctx.dtype))
        return of_input, of_weight, rows.sum(0) if ctx.has_bias else None, None


def exchanged(x: Tensor, exchange: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `exchange(x)`, whose gradient is what `back` makes of the result's."""
    return _apply(_Exchange, x, exchange, back)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return exchange(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(upstream), None, None
