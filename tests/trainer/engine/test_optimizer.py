from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import nn

from trainer.checkpoint.part import Part, whole_box
from trainer.config.parts import OptimizerConfig
from trainer.device import Device
from trainer.engine.optimizer import (
    LARGE,
    ShardedAdamW,
    adamw,
    decay_of,
    owners,
)
from trainer.engine.parts import optimizer_parts
from trainer.parallel.group import Group


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


def put(key: str, tensor: torch.Tensor, owned: bool) -> Iterator[Part]:
    yield Part(key, tuple(tensor.shape), whole_box(tensor.shape), tensor, owned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_the_nodes_memory_gives_the_same_weights(dtype: torch.dtype) -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.3)
    weights = []
    for host in (False, True):
        named = {"w": nn.Parameter(torch.linspace(0, 1, 6).view(3, 2)), "b": nn.Parameter(torch.ones(3))}
        own = ShardedAdamW(named, config, Group(0, 1, Device("cpu")), zero=0, host=host)
        if dtype != torch.float32:
            own.lower(["w"], dtype)
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


def test_large_parameters_travel_from_their_place_and_small_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"large": LARGE // 4, "odd": LARGE // 4 - 1, "small": 2}
    named = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    sent = list[tuple[int, torch.Tensor]]()

    def fill_with_the_senders(_: Group, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
        for tensor in tensors:
            sent.append((source, tensor))
            tensor.fill_(source + 1)

    monkeypatch.setattr(Group, "broadcast", fill_with_the_senders)
    own = ShardedAdamW(named, OptimizerConfig(), Group(1, 2, Device("cpu")), zero=1)
    own.owner = {"large": 0, "odd": 0, "small": 0}
    own.mine = {}
    own.step(0.1)
    assert [(source, len(tensor)) for source, tensor in sent] == [
        (0, sizes["large"]),
        (0, sizes["odd"] + sizes["small"]),
    ]
    assert sent[0][1].data_ptr() == named["large"].data_ptr()
    assert all(torch.all(parameter == 1) for parameter in named.values())
