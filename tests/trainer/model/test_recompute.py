"""Recomputation changes what is kept, and not one bit of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import native
from trainer.config.model import ModelConfig
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.model.linear import RowLinear
from trainer.model.recompute import NOTHING, Recompute
from trainer.parallel.tensor import ALONE

Make = Callable[..., dict[str, Any]]
SHAPE = ModelConfig(layers=3, hidden=32, heads=4, sequence=48, vocab=69, dropout=0.2, attention_dropout=0.1)
MODES = [Recompute("full"), Recompute("full", every=2), Recompute("selective")]


def passed(
    recompute: Recompute, kind: str, precision: str, attention: str = "auto"
) -> tuple[Tensor, list[Tensor], int]:
    """Loss, gradients, and the bytes kept for the backward pass, of one pass of a model."""
    ops = native.choose("cpu", {"attention": attention})
    config = ModelConfig(**{**SHAPE.__dict__, "kind": kind})
    tokens = torch.randint(0, 60, (2, 49), generator=torch.Generator().manual_seed(1))
    if kind == "gpt":
        model: GPT | GLM = GPT(config, ops, recompute=recompute)
        arguments = model.arguments((tokens,))
    else:
        model = GLM(config, ops, recompute=recompute)
        positions = torch.arange(49).clamp(max=30).expand(2, 2, 49)
        mask = (torch.arange(49) > 30).expand(2, 49)
        arguments = model.arguments((tokens, tokens.roll(-1, 1), mask, positions, torch.tensor([31, 20])))
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    torch.manual_seed(5)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), cast:
        loss = model(*arguments)
    # What the backward pass makes again comes on top.
    forward = kept
    loss.backward()
    return (
        loss.detach(),
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        forward,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt", "glm"])
@pytest.mark.parametrize("recompute", MODES, ids=lambda one: f"{one.mode}-{one.every}")
def test_losses_and_gradients_are_the_same_to_the_last_bit(
    recompute: Recompute, kind: str, precision: str
) -> None:
    # Selective is for an attention that keeps its scores; a CPU's kernel may keep none.
    attention = "reference" if recompute.mode == "selective" else "auto"
    loss, gradients, kept = passed(NOTHING, kind, precision, attention)
    again, others, less = passed(recompute, kind, precision, attention)
    assert torch.equal(loss, again) and len(gradients) == len(others) > 30
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))
    assert less < kept * (0.5 if recompute.mode == "full" else 0.95)


@pytest.mark.parametrize("kind", ["gpt", "glm"])
def test_a_job_that_recomputes_has_the_losses_of_one_that_keeps_on_every_layout(
    kind: str,
    tmp_path: Path,
    prefix: Path,
    raw_config: Make,
    run_ranks: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
) -> None:
    found = []
    full = {"mode": "full", "split": True}
    for name, recompute in {"none": "none", "selective": "selective", "split": full}.items():
        raw = raw_config(
            model={
                "kind": kind,
                "layers": 2,
                "hidden": 32,
                "heads": 2,
                "sequence": 33,
                "vocab": 69,
                "dropout": 0.1,
                "attention_dropout": 0.2,
            },
            data={"prefix": str(prefix), "split": "80,20,0", **({"eod": 3} if kind == "glm" else {})},
            parallel={"tensor": 2},
            recompute=recompute,
            eval={"batches": 0},
        )
        done = run_ranks(2, raw, tmp_path / name)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
        found.append([(one["loss"], one["grad_norm"]) for one in metrics(tmp_path / name, "step")])
    assert len(found[0]) == 8 and found[0] == found[1] == found[2]


@pytest.mark.parametrize(("is_frozen", "calls"), [(True, 1), (False, 2)])
def test_the_activation_before_a_frozen_matrix_is_computed_once(is_frozen: bool, calls: int) -> None:
    class Relu:
        count = 0

        def __call__(self, inner: Tensor) -> Tensor:
            self.count += 1
            return torch.relu(inner)

        def gradient(self, inner: Tensor, upstream: Tensor) -> Tensor:
            return upstream * (inner > 0)

    matrix, activation = RowLinear(8, 4, ALONE), Relu()
    matrix.weight.requires_grad_(not is_frozen)
    x = torch.ones(3, 8, requires_grad=True)
    matrix(x, activation).sum().backward()
    assert activation.count == calls and x.grad is not None
