"""Models with the compiled ops have the losses and gradients of plain torch, with the same numbers dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import native
from trainer.config.model import ModelConfig
from trainer.config.rope import RopeConfig
from trainer.model.gpt import GPT
from trainer.model.recompute import Recompute

pytestmark = pytest.mark.usefixtures("compiled")
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "llama": {"rotary": True, "norm": "rms", "swiglu": True, "bias": "none", "query_groups": 2},
    "neox": {"rotary": True, "parallel_residual": True, "rope": RopeConfig(part=0.5, interleaved=True)},
    "sandwich": {"norm": "rms", "sandwich_norms": True, "dropout": 0.1},
}


def loss_and_gradients(
    shape: dict[str, Any], backend: str, recompute: Recompute
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = ModelConfig(layers=2, hidden=64, heads=4, sequence=48, vocab=97, **shape)
    model = GPT(config, native.choose("cpu", backend), recompute=recompute)
    tokens = torch.randint(97, (3, 49), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_losses_and_gradients_are_those_of_plain_torch(shape: dict[str, Any]) -> None:
    (loss, gradients), (expected, wanted) = (
        loss_and_gradients(shape, backend, Recompute()) for backend in ("auto", "reference")
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-4, atol=2e-6), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_recomputation_gives_identical_bits(shape: dict[str, Any]) -> None:
    (loss, gradients), (expected, wanted) = (
        loss_and_gradients(shape, "auto", Recompute(mode)) for mode in ("full", "none")
    )
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())
