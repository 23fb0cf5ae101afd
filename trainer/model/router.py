"""A router of experts: which experts compute a token, with which weights, and the loss that spreads the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import native
from native import products
from trainer.config.model import ModelConfig
from trainer.model.cuts import Cut
from trainer.parallel.tensor import Parallel

# The weight of a bias's slope: it moves by AdamW, which no factor of slopes changes, and adds little to their norm.
SLOPE = 1e-4


class Router(nn.Module):
    """A matrix scores each expert for each token; every rank has the whole matrix."""

    wide = ("bias",)
    """The parameters that are fp32 in every precision."""

    def __init__(self, config: ModelConfig, ops: native.Choice, parallel: Parallel) -> None:
        super().__init__()
        self.cuts = {"weight": Cut(partial=True), "bias": Cut(partial=True), "offset": Cut(partial=True)}
        self.weight = nn.Parameter(torch.zeros(config.experts, config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.experts)) if config.router_bias else None
        self.offset = nn.Parameter(torch.zeros(config.experts)) if config.expert_bias else None
        """The bias of the matrix; `bias` is added to scores for the choice alone."""
        self.top_k, self.renormalize, self.scale = config.top_k, config.renormalize, config.routed_scale
        self.groups, self.top_groups = config.expert_groups, config.top_groups
        self.sigmoid = config.scoring == "sigmoid"
        self.ops, self.parallel = ops, parallel

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all probabilities, (tokens, experts), and weights and numbers of the chosen experts, (tokens, k).

        A weight that is wider than the tokens is not narrowed: a decoder with narrow matrices has an fp32 router.
        """
        if not torch.is_autocast_enabled(tokens.device.type):
            tokens = tokens.to(self.weight.dtype)
        results = products.linear(tokens, self.weight, self.offset)
        if self.sigmoid or self.bias is not None or self.groups > 1:
            scores = torch.sigmoid(results.float()) if self.sigmoid else torch.softmax(results.float(), -1)
            chosen = self._chosen(scores.detach())
            weights = scores.gather(-1, chosen)
            if self.renormalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            scores = scores / scores.sum(-1, keepdim=True) if self.sigmoid else scores
        else:
            scores, weights, chosen = self.ops.route(results, self.top_k, self.renormalize)
        return scores, weights if self.scale == 1.0 else weights * self.scale, chosen

    def _chosen(self, scores: Tensor) -> Tensor:
        """Return the chosen experts of each token, those of the highest scores first."""
        if self.bias is not None:
            scores = scores + self.bias.detach()
        if self.groups > 1:
            grouped = scores.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2 if self.sigmoid else 1, -1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept.scatter_(-1, best.topk(self.top_groups, -1).indices, True)
            scores = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return torch.argsort(scores, dim=-1, descending=True, stable=True)[:, : self.top_k]

    def correction(self, chosen: Tensor) -> Tensor:
        """Return a loss whose slope at each bias is how far the expert's share of tokens is from an even one."""
        assert self.bias is not None
        parallel, experts = self.parallel, len(self.bias)
        ranks = parallel.size if parallel.divides_sequence else 1
        shares = counts_of(chosen.flatten(), experts).float() * experts / (chosen.numel() * ranks)
        return SLOPE * (self.bias * (shares - 1.0 / ranks)).sum()

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
