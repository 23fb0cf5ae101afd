"""Models with the compiled ops have the losses and gradients of plain torch, with the same numbers dropped."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

import native
from trainer.config.model import ModelConfig
from trainer.config.rope import RopeConfig
from trainer.model.gpt import GPT
from trainer.model.layers import TokenTable
from trainer.model.recompute import Recompute

pytestmark = pytest.mark.usefixtures("compiled")
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "llama": {"rotary": True, "norm": "rms", "swiglu": True, "bias": "none", "query_groups": 2},
    "neox": {"rotary": True, "parallel_residual": True, "rope": RopeConfig(part=0.5, interleaved=True)},
    "sandwich": {"norm": "rms", "sandwich_norms": True, "dropout": 0.1},
    "experts": {"norm": "rms", "swiglu": True, "experts": 4, "top_k": 2, "tied": False},
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


@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_recomputation_gives_identical_bits(shape: dict[str, Any], norms: bool) -> None:
    (loss, gradients), (expected, wanted) = (
        loss_and_gradients(shape, "auto", Recompute(mode, norms=norms)) for mode in ("full", "none")
    )
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_of_norms_that_are_computed_again_are_those_of_the_forward_pass(
    shape: dict[str, Any],
) -> None:
    (loss, gradients), (expected, wanted) = (
        loss_and_gradients(shape, "auto", Recompute(norms=norms)) for norms in (True, False)
    )
    assert torch.equal(loss, expected)
    # Only the order of some sums differs.
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-5, atol=1e-6), name


def tied_model() -> tuple[GPT, torch.Tensor]:
    model = GPT(ModelConfig(layers=1, hidden=64, heads=4, sequence=48, vocab=97), native.choose("cpu"))
    return model, torch.randint(97, (3, 49), generator=torch.Generator().manual_seed(1))


def test_the_gradient_of_a_tied_table_exists_once() -> None:
    """The parameter gets the loss's gradient, to which that of the embedding was added."""
    model, tokens = tied_model()
    seen, take = [], TokenTable.output_matrix

    def taken(table: TokenTable) -> torch.Tensor:
        matrix = take(table)
        matrix.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
        return matrix

    with patch.object(TokenTable, "output_matrix", taken):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert seen == [model.tokens.weight.grad.data_ptr()]


def test_several_losses_of_one_pass_have_all_their_gradients() -> None:
    model, tokens = tied_model()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    # This pass has no loss, and leaves nothing to the next.
    model.hidden(tokens[:1, :7])
    hidden = model.hidden(tokens[:, :-1])
    losses = [model.head.loss(hidden[i : i + 1], tokens[i : i + 1, 1:]) for i in range(3)]
    torch.stack(losses).mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-4, atol=1e-6), name


def test_a_pass_does_not_import_torchs_compiler() -> None:
    """Its modules and sympy would take memory and half a second in each rank."""
    code = """
import sys
import torch
import native
from trainer.config.model import ModelConfig
from trainer.model.gpt import GPT
from trainer.model.recompute import Recompute
for shape in ({}, {"rotary": True, "norm": "rms", "swiglu": True, "bias": "none"}):
    config = ModelConfig(layers=1, hidden=64, heads=4, sequence=48, vocab=97, **shape)
    model = GPT(config, native.choose("cpu"), recompute=Recompute(norms=True))
    tokens = torch.randint(97, (3, 49))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    # Torch 2.6 loads sympy at the first call of an op.
    expected = ["sympy"] if torch.__version__.startswith("2.6.") else []
    assert done.stdout == f"{expected}\n", done.stderr
