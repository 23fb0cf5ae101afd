"""A model can be created without the memory of its matrices; zeros on a device take their places later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import native
from trainer.device import Device
from trainer.model.norm import Norm
from trainer.model.unallocated import Unallocated, allocate
from trainer.parallel.group import Group, Groups
from trainer.parallel.tensor import ALONE
from trainer.plan.resolve import read_config
from trainer.train.assemble import build_model

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8, "vocab": 60},
    "experts": {
        "layers": 2,
        "hidden": 16,
        "heads": 2,
        "sequence": 8,
        "vocab": 60,
        "experts": 4,
        "top_k": 2,
        "ffn": 32,
        "tied": False,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_matrices_have_no_memory_until_they_are_allocated(
    name: str, raw_config: Callable[..., dict[str, Any]]
) -> None:
    config = read_config(raw_config(model=MODELS[name]), 1)
    ops, group = native.choose("cpu", "reference"), Group(0, 1, Device("cpu"))
    groups = Groups(group, group, ALONE)
    plain = build_model(config, ops, groups, drawn=False)
    with Unallocated():
        model = build_model(config, ops, groups, drawn=False)
    for key, parameter in model.named_parameters():
        assert parameter.is_meta == (parameter.dim() > 1), key
    allocate(model, "cpu")
    for (key, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, wanted) and parameter.requires_grad == wanted.requires_grad, key
    assert any(isinstance(module, Norm) and module.weight.all() for module in model.modules())


def test_a_parameter_that_is_not_learned_stays_so() -> None:
    with Unallocated():
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.zeros((3, 2)), requires_grad=False)
        layer.bias = torch.nn.Parameter(torch.zeros(3))
    assert layer.weight.is_meta and not layer.bias.is_meta
    allocate(layer, "cpu")
    assert layer.weight.tolist() == [[0.0, 0.0]] * 3 and not layer.weight.requires_grad
