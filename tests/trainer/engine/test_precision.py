"""Weights in bf16: what is kept in fp32 all the same, and that nothing of it is lost between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint.store import open_checkpoint
from trainer.device import Device
from trainer.engine.rank_state import GradientBuffer, ReplicatedState
from trainer.model.cuts import Cut
from trainer.parallel.group import Group
from trainer.parallel.tensor import ALONE
from trainer.plan.resolve import read_config

Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]


def losses(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in lines]


def test_a_bf16_training_keeps_fp32_masters_and_goes_on_in_any_precision(
    tmp_path: Path, train_here: Callable[..., Any], metrics: Read
) -> None:
    train_here(tmp_path / "whole", precision="bf16")
    train_here(tmp_path / "parts", precision="bf16", stop_after=4)
    train_here(tmp_path / "parts", precision="bf16")
    whole = losses(metrics(tmp_path / "whole", "step"))
    assert losses(metrics(tmp_path / "parts", "step")) == whole and len(whole) == 8
    folder = tmp_path / "whole" / "checkpoints" / "step-00000004"
    saved = open_checkpoint(folder)
    kept = saved.read(list(saved.weights))
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert not torch.equal(kept["tokens.weight"], kept["tokens.weight"].bfloat16().float())
    train_here(tmp_path / "wide", precision="fp32", resume=str(folder))
    wide = losses(metrics(tmp_path / "wide", "step"))
    assert len(wide) == 4 and wide != whole[4:]
    assert wide == [(pytest.approx(one, rel=1e-2), pytest.approx(two, rel=5e-2)) for one, two in whole[4:]]


def test_masters_as_remainders_give_the_same_losses_and_checkpoints(
    tmp_path: Path, train_here: Callable[..., Any], metrics: Read, capsys: pytest.CaptureFixture[str]
) -> None:
    for masters in ("fp32", "remainder"):
        train_here(tmp_path / masters, precision="bf16", optimizer={"lr": 1e-2, "masters": masters})
    # Each continues what the other began.
    for first, second in (("fp32", "remainder"), ("remainder", "fp32")):
        train_here(
            tmp_path / first / "then",
            precision="bf16",
            optimizer={"lr": 1e-2, "masters": first},
            stop_after=4,
        )
        train_here(tmp_path / first / "then", precision="bf16", optimizer={"lr": 1e-2, "masters": second})
    folders = [tmp_path / name for name in ("fp32", "remainder", "fp32/then", "remainder/then")]
    whole = losses(metrics(folders[0], "step"))
    assert len(whole) == 8
    saved = [open_checkpoint(folder / "checkpoints" / "step-00000008") for folder in folders]
    state = [checkpoint.read(list(checkpoint.table)) for checkpoint in saved]
    for folder, own in zip(folders[1:], state[1:], strict=True):
        assert losses(metrics(folder, "step")) == whole
        for name, tensor in state[0].items():
            assert torch.equal(own[name].view(torch.int32), tensor.view(torch.int32))
    assert "not the course" not in capsys.readouterr().out


@pytest.mark.parametrize("masters", ["auto", "fp32"])
def test_a_cpu_stores_remainders_of_bf16_weights_between_steps(raw_config: Make, masters: str) -> None:
    import native
    from trainer.model.gpt import GPT

    config = read_config(raw_config(precision="bf16", optimizer={"masters": masters}))
    model = GPT(config.model, native.choose("cpu"), seed=3)
    state = ReplicatedState(model, config, Group(0, 1, Device("cpu")))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.wait()
    state.update(1e-3)
    low = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}
    split = masters == "auto"
    assert state.optimizer.remainders.keys() == (low if split else set())
    assert state.optimizer.masters.keys() == (set() if split else low)
    assert {part.tensor.dtype for part in state.parts() if part.owned} == {torch.float32}


def test_layer_norms_stay_fp32_and_the_optimizer_holds_the_rest_in_fp32(raw_config: Make) -> None:
    import native
    from trainer.model.gpt import GPT

    config = read_config(raw_config(precision="bf16"))
    model = GPT(config.model, native.choose("cpu"), seed=3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    held = ReplicatedState(model, config, Group(0, 1, Device("cpu")))
    saved = {part.key: part.tensor for part in held.parts() if part.owned}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (
            torch.float32 if ".norm_" in name or name.startswith("norm.") else torch.bfloat16
        )
        assert torch.equal(saved[name], before[name][: len(saved[name])])


@pytest.mark.parametrize("passes", [1, 3])
def test_one_gradient_is_used_as_it_comes_and_several_are_added_in_fp32(passes: int) -> None:
    weight = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    buffer = GradientBuffer({"w": weight}, {"w": Cut()}, Group(0, 1, Device("cpu")), ALONE)
    # Whose sum bf16 has no bits for.
    given = [torch.full((300,), 1.0 + i / 128) for i in range(passes)]
    buffer.clear()
    for i, gradient in enumerate(given):
        if i == passes - 1:
            buffer.sum_on_next_backward()
        (weight * gradient.bfloat16()).sum().backward()
    buffer.wait()
    found = buffer.gradients()["w"]
    assert found.dtype == (torch.bfloat16 if passes == 1 else torch.float32)
    assert torch.equal(found.float(), torch.stack(given).sum(0))
    assert buffer.norm() == pytest.approx(float(torch.stack(given).sum(0).norm()), rel=1e-6)


def test_two_ranks_divide_the_masters_and_one_goes_on_from_them(
    tmp_path: Path,
    raw_config: Make,
    run_ranks: Callable[..., Any],
    train_here: Callable[..., Any],
    metrics: Read,
) -> None:
    train_here(tmp_path / "one", precision="bf16")
    config = raw_config(precision="bf16", zero=1)
    done = run_ranks(2, config, tmp_path / "two", CLUSTERCTL_FAULT="rank0:step6:exit7")
    assert done[0].returncode == 7, done[0].stderr
    train_here(tmp_path / "two", precision="bf16")
    one, two = (losses(metrics(tmp_path / name, "step")) for name in ("one", "two"))
    assert metrics(tmp_path / "two", "start")[1]["step"] == 4
    for (loss, norm), (other, other_norm) in zip(one[:5] + one[4:], two, strict=True):
        assert other == pytest.approx(loss, rel=3e-3) and other_norm == pytest.approx(norm, rel=3e-2)
