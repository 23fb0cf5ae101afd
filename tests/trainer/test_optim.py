from __future__ import annotations

import torch
from torch import nn

from trainer.config_parts import OptimizerConfig
from trainer.device import Device
from trainer.group import Group
from trainer.optim import ShardedAdamW, adamw, decay_of, owners


def test_only_matrices_decay() -> None:
    config = OptimizerConfig(weight_decay=0.3)
    assert decay_of(nn.Parameter(torch.zeros(2, 2)), config) == 0.3
    assert decay_of(nn.Parameter(torch.zeros(2)), config) == 0.0


def test_the_update_is_that_of_torchs_own_optimizer() -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.3)
    ours, theirs = ({"w": nn.Parameter(torch.ones(3, 2)), "b": nn.Parameter(torch.ones(3))} for _ in range(2))
    own = ShardedAdamW(ours, config, Group(0, 1, Device("cpu")), zero=0)
    reference = adamw(theirs, config)
    for step in range(3):
        for one, two in zip(ours.values(), theirs.values(), strict=True):
            one.grad = torch.full_like(one, 0.1 * (step + 1))
            two.grad = one.grad.clone()
        own.step(0.1)
        reference.step()
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7) for name in ours)


def test_owners_share_the_parameters_evenly_and_alike_on_every_rank() -> None:
    named = {f"p{i}": nn.Parameter(torch.zeros(size)) for i, size in enumerate((8, 7, 6, 5, 4))}
    owner = owners(named, 2)
    assert owner == {"p0": 0, "p1": 1, "p2": 1, "p3": 0, "p4": 0}
