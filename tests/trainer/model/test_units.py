"""A norm and a router are units: another kind, in a few lines, is trained, planned, decoded and refused for export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import native
from clusterctl.wire.requests import ExportRequest
from native.decode.packed import why_not
from trainer.config.model import ModelConfig
from trainer.config.norm import NORMS, NormKind
from trainer.errors import InputError
from trainer.generate.network import of_model
from trainer.model.gpt import GPT
from trainer.model.norm import LAYERS, Norm
from trainer.model.router import Router
from trainer.plan import activations
from trainer.weights.megatron.config import check_fits

SMALL = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 60, "vocab_multiple": 1}


class LargestNorm(Norm):
    """Divides each row by its largest number."""

    def normal(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * weight

    def after(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + residual, self.normal(x + residual, weight)


class SigmoidRouter(Router):
    """A router that scores each expert with a sigmoid of its own and adds no balancing loss."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chances = torch.sigmoid(tokens @ self.weight.T)
        return chances, *chances.topk(self.top_k)

    def imbalance(self, chances: Tensor, chosen: Tensor) -> Tensor:
        return chances.sum() * 0


def losses_of_two_steps(model: GPT) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.randint(0, model.config.vocab, (4, 17), generator=torch.Generator().manual_seed(1))
    model.aux_weight, found = 1.0, []
    for _ in range(2):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())
        found.append(loss.item())
    return found


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setitem(NORMS, "largest", NormKind())
    monkeypatch.setitem(LAYERS, "largest", LargestNorm)
    return ModelConfig(norm="largest", **SMALL)


def test_another_norm_is_trained_planned_and_decoded(largest: ModelConfig) -> None:
    model = GPT(largest, native.choose("cpu"), seed=3)
    first, second = losses_of_two_steps(model)
    assert second < first
    assert sum(parameter.numel() for parameter in model.parameters()) == largest.parameters()
    assert activations.norm(activations.MicroBatch(largest, 2, 4)) == 2 * 16 * (32 * 4 + 4)
    network = of_model(model.eval(), 8, "fp32")
    assert network.fused is None, "the compiled decoder does not have this norm"
    known = of_model(GPT(ModelConfig(**SMALL), native.choose("cpu")).eval(), 8, "fp32")
    assert bool(why_not()) == (known.fused is None)


def test_a_norm_that_megatron_lacks_is_refused_by_name(largest: ModelConfig) -> None:
    with pytest.raises(InputError, match="no model with norm largest"):
        check_fits(largest, ExportRequest())


def test_another_router_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.model.experts.Router", SigmoidRouter)
    model = GPT(ModelConfig(experts=4, **SMALL), native.choose("cpu"), seed=3)
    first, second = losses_of_two_steps(model)
    assert second < first


def test_the_biases_of_a_router_move_towards_equal_shares() -> None:
    config = ModelConfig(experts=4, router_bias=True, scoring="sigmoid", aux_loss=0.0, **SMALL)
    model = GPT(config, native.choose("cpu"), seed=3)
    losses_of_two_steps(model)
    router = model.blocks["0"].feed_forward.router  # type: ignore[union-attr]
    assert isinstance(router, Router) and router.bias is not None and router.bias.grad is not None
    # More than an even share lowers the bias, less raises it, and the shares are even on average.
    assert router.bias.grad.abs().max() > 0
    assert router.bias.grad.sum().abs() < 1e-8
    router.bias.grad = None
    chosen = torch.tensor([[0, 1], [0, 1], [0, 2]])
    router.correction(chosen).backward()
    assert router.bias.grad is not None
    assert (router.bias.grad.sign() == torch.tensor([1, 1, -1, -1])).all()
