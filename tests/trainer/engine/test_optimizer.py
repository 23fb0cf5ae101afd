from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import native
from trainer.checkpoint.part import Part, whole_box
from trainer.config.parts import OptimizerConfig
from trainer.engine.optimizer import AdamW, adamw, decay_of
from trainer.engine.parts import optimizer_parts


def test_only_matrices_decay() -> None:
    config = OptimizerConfig(weight_decay=0.3)
    assert decay_of(nn.Parameter(torch.zeros(2, 2)), config) == 0.3
    assert decay_of(nn.Parameter(torch.zeros(2)), config) == 0.0


def test_the_update_is_that_of_torchs_own_optimizer() -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.3)
    ours, theirs = ({"w": nn.Parameter(torch.ones(3, 2)), "b": nn.Parameter(torch.ones(3))} for _ in range(2))
    own = AdamW(ours, config, {"w": 0.3, "b": 0.0}, native.choose("cpu"))
    reference = adamw(theirs, config)
    for step in range(3):
        for one, two in zip(ours.values(), theirs.values(), strict=True):
            one.grad = torch.full_like(one, 0.1 * (step + 1))
            two.grad = one.grad.clone()
        own.step(0.1)
        reference.step()
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7) for name in ours)


def put(key: str, tensor: torch.Tensor, owned: bool) -> Iterator[Part]:
    yield Part(key, tuple(tensor.shape), whole_box(tensor.shape), tensor, owned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_the_nodes_memory_gives_the_same_weights(dtype: torch.dtype) -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.3)
    weights = []
    for host in (False, True):
        named = {"w": nn.Parameter(torch.linspace(0, 1, 6).view(3, 2)), "b": nn.Parameter(torch.ones(3))}
        masters = {"w": named["w"].data} if dtype != torch.float32 else {}
        named["w"].data = named["w"].data.to(dtype)
        own = AdamW(named, config, {"w": 0.3, "b": 0.0}, native.choose("cpu"), masters, host)
        started = {"w": torch.linspace(-1, 2, 6).view(3, 2), "exp_avg.b": torch.full((3,), 0.5)}
        for name in named:
            for part in optimizer_parts(own, name, put, owned=True):
                part.tensor.copy_(started.get(part.key, part.tensor))
        for step in range(3):
            own.step(0.1, {name: torch.full_like(one, 0.1 * (step + 1)) for name, one in named.items()}, 0.5)
        assert own.masters.keys() == ({"w", "b"} if host else {"w"} - {"w" if dtype == torch.float32 else ""})
        assert all(one.data_ptr() != named[name].data_ptr() for name, one in own.masters.items())
        parts = [part for name in named for part in optimizer_parts(own, name, put, owned=True)]
        assert named["w"].dtype == dtype
        assert all(part.tensor.dtype == torch.float32 for part in parts if part.owned)
        weights.append([*named.values(), *(part.tensor for part in parts if part.owned)])
    assert all(torch.equal(one, two) for one, two in zip(*weights, strict=True))
