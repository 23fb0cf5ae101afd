"""A router of experts: which experts compute a token, with which weights, and the loss that spreads the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import native
from native import products
from trainer.config.model import ModelConfig
from trainer.model.cuts import Cut
from trainer.parallel.tensor import Parallel


class Router(nn.Module):
    """A matrix scores each expert for each token; every rank has the whole matrix."""

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel) -> None:
        super().__init__()
        self.cuts = {"weight": Cut(partial=True)}
        self.weight = nn.Parameter(torch.zeros(config.experts, config.hidden))
        self.top_k, self.renormalize = config.top_k, config.renormalize
        self.ops, self.parallel = ops, parallel

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all probabilities, (tokens, experts), and weights and numbers of the chosen experts, (tokens, k).

        A weight that is wider than the tokens is not narrowed: a decoder with narrow matrices has an fp32 router.
        """
        if not torch.is_autocast_enabled(tokens.device.type):
            tokens = tokens.to(self.weight.dtype)
        return self.ops.route(products.linear(tokens, self.weight), self.top_k, self.renormalize)

    def imbalance(self, chances: Tensor, chosen: Tensor) -> Tensor:
        """Return experts x sum over experts of (fraction of choices x mean probability): 1 if all are used equally."""
        parallel, divided, experts = self.parallel, self.parallel.divides_sequence, chances.shape[1]
        counts = counts_of(chosen.flatten(), experts).float()
        total = float(chances.shape[0] * (parallel.size if divided else 1))
        means = chances.sum(0) / total
        if divided:
            # The gradient is for this rank's tokens; it is summed over the ranks together with the router's.
            counts = parallel.sum(counts)
        parts = counts / (total * self.top_k)
        return experts * (parts * means).sum()


def counts_of(experts: Tensor, count: int) -> Tensor:
    """Return how often each expert occurs; unlike torch.bincount, the host does not wait for the device."""
    return torch.zeros(count, dtype=torch.int64, device=experts.device).scatter_add_(
        0, experts, torch.ones_like(experts)
    )
