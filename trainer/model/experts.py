"""Mixture of experts: a router chooses a few feed-forward layers (experts) for each token.

Tensor parallel ranks divide the experts. If every rank has all tokens, each rank computes the results of its own
experts, and the results are summed. With sequence parallel each rank has different tokens; they are sent to the ranks
of their experts and back (all-to-all).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import native
from native import products
from trainer.config.model import ModelConfig
from trainer.model.cuts import Cut
from trainer.model.feed_forward import Activation, FeedForward
from trainer.parallel.tensor import Parallel


class ExpertLinear(nn.Module):
    """One matrix for each expert of this rank."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, ops: native.Choice, parallel: Parallel
    ) -> None:
        super().__init__()
        self.cuts, self.ops = {"weight": Cut(0)}, ops
        self.weight = nn.Parameter(torch.zeros(experts // parallel.size, outputs, inputs))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return each row times its expert's matrix; rows are sorted by expert, `counts` are the rows of each."""
        return self.ops.grouped_linear(rows, self.weight, counts)


class Router(nn.Module):
    """The matrix that scores each expert for each token; every rank has the whole matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.cuts = {"weight": Cut(partial=True)}
        self.weight = nn.Parameter(torch.zeros(config.experts, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (tokens, experts)."""
        return products.linear(x, self.weight)


class Experts(nn.Module):
    """The feed-forward part of a block with experts, and optionally with a shared expert for all tokens."""

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel) -> None:
        super().__init__()
        self.config, self.ops, self.parallel = config, ops, parallel
        self.router = Router(config)
        self.up = ExpertLinear(config.experts, config.hidden, config.up_width, ops, parallel)
        self.down = ExpertLinear(config.experts, config.inner, config.hidden, ops, parallel)
        self.activation = Activation(config, ops)
        self.shared = FeedForward(config, ops, parallel, config.shared_ffn) if config.shared_ffn else None
        self.own = len(self.up.weight)
        """The number of experts on this rank."""

    def forward(self, x: Tensor, aux_weight: float = 0.0) -> Tensor:
        """Return (batch, sequence, hidden). `aux_weight`: the weight of the auxiliary loss in the loss of the step."""
        tokens = x.flatten(0, 1)
        chances, weights, chosen = self.ops.route(
            self.router(tokens), self.config.top_k, self.config.renormalize
        )
        weights = weights * self._within_capacity(chosen, x.shape[0])
        mix = self._across_ranks if self.parallel.divides_sequence else self._own_experts
        mixed = mix(tokens, weights.to(x.dtype), chosen).view(x.shape)
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        if aux_weight and self.config.aux_loss:
            mixed = _apply(
                _Attached, mixed, self._imbalance(chances, chosen), aux_weight * self.config.aux_loss
            )
        return mixed

    def _within_capacity(self, chosen: Tensor, batch: int) -> Tensor | float:
        """Return 1 for each (token, choice) that fits the expert's capacity, else 0; earlier tokens come first."""
        if not self.config.capacity:
            return 1.0
        parallel, size = self.parallel, self.parallel.size
        divided = parallel.divides_sequence
        own = chosen.view(batch, -1, self.config.top_k)
        everyone = parallel.gather(own) if divided else own
        most = math.ceil(self.config.capacity * everyone.numel() / self.config.experts)
        marks = F.one_hot(everyone.flatten(), self.config.experts)
        before = (marks.cumsum(0) * marks).sum(-1).view(everyone.shape)
        fits = (before <= most).float()
        if divided:
            fits = fits.chunk(size, 1)[parallel.rank]
        return fits.reshape(chosen.shape)

    def _own_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the results of all ranks' experts for all tokens."""
        tokens, weights = self.parallel.enter(tokens), self.parallel.enter(weights)
        first = self.own * self.parallel.rank
        mine = (chosen >= first) & (chosen < first + self.own) & (weights > 0)
        index, choice = mine.nonzero(as_tuple=True)
        experts = chosen[index, choice] - first
        order = torch.argsort(experts, stable=True)
        index, choice = index[order], choice[order]
        results = self._run(self.ops.embedding(index, tokens), torch.bincount(experts, minlength=self.own))
        mixed = torch.zeros_like(tokens).index_add(0, index, results * weights[index, choice].unsqueeze(-1))
        return self.parallel.leave(mixed)

    def _across_ranks(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the results for this rank's tokens, which are sent to the ranks of their experts and back."""
        size, rank = self.parallel.size, self.parallel.rank
        index, choice = (weights > 0).nonzero(as_tuple=True)
        experts = chosen[index, choice]
        order = torch.argsort(experts, stable=True)
        index, choice = index[order], choice[order]
        counts = torch.bincount(experts, minlength=self.config.experts)
        # How many rows each rank sends for each expert.
        table = self.parallel.gather(counts.view(1, -1), 0).view(size, size, self.own)
        sent, received = table[rank].sum(-1).tolist(), table[:, rank].sum(-1).tolist()
        arrived = _apply(_Exchanged, self.ops.embedding(index, tokens), sent, received, self.parallel)
        of_expert = torch.arange(self.own, device=counts.device).repeat(size)
        of_expert = of_expert.repeat_interleave(table[:, rank].flatten())
        order = torch.argsort(of_expert, stable=True)
        results = self._run(arrived[order], torch.bincount(of_expert, minlength=self.own))
        results = results[torch.argsort(order)]
        returned = _apply(_Exchanged, results, received, sent, self.parallel)
        return torch.zeros_like(tokens).index_add(0, index, returned * weights[index, choice].unsqueeze(-1))

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of this rank's experts; rows are sorted by expert, `counts` are the rows of each."""
        result: Tensor = self.down(self.activation(self.up(rows, counts)), counts)
        return result

    def _imbalance(self, chances: Tensor, chosen: Tensor) -> Tensor:
        """Return experts x sum over experts of (fraction of choices x mean probability): 1 if all are used equally."""
        parallel, divided = self.parallel, self.parallel.divides_sequence
        counts = torch.bincount(chosen.flatten(), minlength=self.config.experts).float()
        total = float(chances.shape[0] * (parallel.size if divided else 1))
        means = chances.sum(0) / total
        if divided:
            # The gradient is for this rank's tokens; it is summed over the ranks together with the router's.
            counts = parallel.sum(counts)
        parts = counts / (total * self.config.top_k)
        return self.config.experts * (parts * means).sum()


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _Attached(torch.autograd.Function):
    """Returns its input; the backward pass adds the gradient of an auxiliary loss times its weight.

    In this way each pipeline stage computes the auxiliary loss of its own layers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = loss.new_tensor(weight)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        return upstream, ctx.weight, None


class _Exchanged(torch.autograd.Function):
    """Sends rows to other ranks: the first `sent[0]` to rank 0, and so on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], parallel: Parallel) -> Tensor:
        ctx.sent, ctx.received, ctx.parallel = sent, received, parallel
        return _exchange(rows, sent, received, parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(upstream, ctx.received, ctx.sent, ctx.parallel), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], parallel: Parallel) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=parallel.group)
    return out
