"""Mixture of experts: a router chooses a few feed-forward layers (experts) for each token.

Tensor parallel ranks divide the experts. If every rank has all tokens, each rank computes the results of its own
experts, and the results are summed. With sequence parallel each rank has different tokens; they are sent to the ranks
of their experts and back (all-to-all).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import native
from trainer.config.model import ModelConfig
from trainer.model.cuts import Cut
from trainer.model.feed_forward import Activation, FeedForward
from trainer.model.router import Router, counts_of
from trainer.parallel.tensor import Parallel, exchanged


class ExpertLinear(nn.Module):
    """One matrix for each expert of this rank."""

    def __init__(
        self, config: ModelConfig, inputs: int, outputs: int, ops: native.Choice, parallel: Parallel
    ) -> None:
        super().__init__()
        self.cuts, self.ops = {"weight": Cut(0), "bias": Cut(0)}, ops
        own = config.experts // parallel.size
        self.weight = nn.Parameter(torch.zeros(own, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(own, outputs)) if config.expert_bias else None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return each row times its expert's matrix; rows are sorted by expert, `counts` are the rows of each."""
        result = self.ops.grouped_linear(rows, self.weight, counts)
        if self.bias is None:
            return result
        return result + self.bias.repeat_interleave(counts, 0, output_size=len(rows)).to(result.dtype)


class Experts(nn.Module):
    """The feed-forward part of a block with experts, and optionally with a shared expert for all tokens."""

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel) -> None:
        super().__init__()
        self.config, self.ops, self.parallel = config, ops, parallel
        self.router = Router(config, ops, parallel)
        self.up = ExpertLinear(config, config.hidden, config.up_width, ops, parallel)
        self.down = ExpertLinear(config, config.inner, config.hidden, ops, parallel)
        self.activation = Activation(config, ops)
        self.shared = FeedForward(config, ops, parallel, config.shared_ffn) if config.shared_ffn else None
        self.own = len(self.up.weight)
        """The number of experts on this rank."""

    def forward(self, x: Tensor, aux_weight: float | Tensor = 0.0) -> Tensor:
        """Return (batch, sequence, hidden). `aux_weight`: the weight of the auxiliary loss in the loss of the step."""
        tokens = x.flatten(0, 1)
        chances, weights, chosen = self.router(tokens)
        weights = weights * self._within_capacity(chosen, x.shape[0])
        mix = self._across_ranks if self.parallel.divides_sequence else self._own_experts
        mixed = mix(tokens, weights.to(x.dtype), chosen).view(x.shape)
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        # A tensor is the weight of a captured pass, whose value the host does not know.
        learns = isinstance(aux_weight, Tensor) or aux_weight
        if self.config.aux_loss and learns:
            loss = self.router.imbalance(chances, chosen)
            mixed = _Attached.apply(mixed, loss, aux_weight, self.config.aux_loss)  # type: ignore[no-untyped-call]
        if self.router.bias is not None and learns:
            loss = self.router.correction(chosen)
            mixed = _Attached.apply(mixed, loss, aux_weight, 1.0)  # type: ignore[no-untyped-call]
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
        # On a CPU and on an NPU, F.one_hot gives the smallest index to the host.
        marks = everyone.reshape(-1, 1) == torch.arange(self.config.experts, device=chosen.device)
        before = (marks.cumsum(0) * marks).sum(-1).view(everyone.shape)
        fits = (before <= most).float()
        if divided:
            fits = fits.chunk(size, 1)[parallel.rank]
        return fits.reshape(chosen.shape)

    def _own_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the results of all ranks' experts for all tokens."""
        tokens, weights = self.parallel.enter(tokens), self.parallel.enter(weights)
        experts, first = chosen.flatten(), self.own * self.parallel.rank
        if self.parallel.size == 1:
            # Every choice is computed, also without weight, so the host need not know how many there are.
            places = torch.argsort(experts, stable=True)
        else:
            mine = (experts >= first) & (experts < first + self.own) & (weights.flatten() > 0)
            places = mine.nonzero().flatten()
            experts = experts[places] - first
            places = places[torch.argsort(experts, stable=True)]
        rows = self.ops.embedding(places // self.config.top_k, tokens)
        results = self._run(rows, counts_of(experts, self.own))
        return self.parallel.leave(self._mixed(results, places, weights))

    def _mixed(self, results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its choices, in their order: the same bits in every run.

        `places`: of each row, token x top_k + choice. A choice without a row counts as 0.
        """
        of_choices = results.new_zeros(weights.numel(), results.shape[1]).index_copy(0, places, results)
        mixed: Tensor = (of_choices.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)
        return mixed

    def _across_ranks(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the results for this rank's tokens, which are sent to the ranks of their experts and back."""
        size, rank = self.parallel.size, self.parallel.rank
        places = (weights.flatten() > 0).nonzero().flatten()
        experts = chosen.flatten()[places]
        places = places[torch.argsort(experts, stable=True)]
        counts = counts_of(experts, self.config.experts)
        # How many rows each rank sends for each expert.
        table = self.parallel.gather(counts.view(1, -1), 0).view(size, size, self.own)
        sent, received = table[rank].sum(-1).tolist(), table[:, rank].sum(-1).tolist()
        send, send_back = (
            partial(_exchange, sent=given, received=taken, group=self.parallel.group)
            for given, taken in ((sent, received), (received, sent))
        )
        arrived = exchanged(self.ops.embedding(places // self.config.top_k, tokens), send, send_back)
        of_expert = torch.arange(self.own, device=counts.device).repeat(size)
        of_expert = of_expert.repeat_interleave(table[:, rank].flatten())
        order = torch.argsort(of_expert, stable=True)
        results = self._run(arrived[order], counts_of(of_expert, self.own))
        results = results[torch.argsort(order)]
        return self._mixed(exchanged(results, send_back, send), places, weights)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of this rank's experts; rows are sorted by expert, `counts` are the rows of each."""
        result: Tensor = self.down(self.activation(self.up(rows, counts)), counts)
        return result


class _Attached(torch.autograd.Function):
    """Returns its input; the backward pass adds the gradient of an auxiliary loss times its weight and share.

    In this way each pipeline stage computes the auxiliary loss of its own layers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float | Tensor, share: float) -> Tensor:
        ctx.weight = (weight if isinstance(weight, Tensor) else loss.new_tensor(weight)) * share
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return upstream, ctx.weight, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send rows to other ranks: the first `sent[0]` to rank 0, and so on."""
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
