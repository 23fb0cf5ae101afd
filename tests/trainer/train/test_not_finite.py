"""A step that is not finite names the layer and the rank where it first went wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from clusterctl.wire.metrics import StepDone
from trainer.config.model_sizes import sized
from trainer.engine.torch_engine import StepResult
from trainer.model.gpt import GPT
from trainer.train.not_finite import NonFiniteHooks, _depth
from trainer.train.observers import step_line

SIZE = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 60}


def watched(spoil: Callable[[GPT], Any]) -> tuple[int, str]:
    from dataclasses import replace

    model = GPT(replace(sized("gpt-tiny"), **SIZE), native.choose("cpu", "reference"))
    spoil(model)
    tokens = torch.arange(17).unsqueeze(0)
    with NonFiniteHooks(model) as watch:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    assert watch.first is not None
    assert not any(module._forward_hooks and module is not model.blocks["0"] for module in model.modules())
    return watch.first[0], watch.first[2]


def _set(parameter: Any, value: float) -> None:
    parameter.data[0] = value


def test_a_weight_comes_before_what_it_makes() -> None:
    assert watched(
        lambda model: _set(model.get_parameter("blocks.1.feed_forward.up.weight"), float("nan"))
    ) == (
        0,
        "the weight blocks.1.feed_forward.up.weight is not finite",
    )


def test_the_first_output_is_named_and_not_those_that_follow() -> None:
    found = watched(lambda model: _set(model.get_parameter("blocks.1.feed_forward.down.weight"), 3e38))
    assert found == (1, "the output of blocks.1.feed_forward.down is not finite")


def test_a_gradient_is_named_where_all_outputs_are_finite() -> None:
    def spoil(model: GPT) -> None:
        model.blocks["0"].register_forward_hook(
            lambda module, given, out: out.register_hook(lambda gradient: gradient * float("inf")) and None
        )

    phase, words = watched(spoil)
    assert phase == 2 and words == "the gradient of the output of blocks.0 is not finite"


def test_depths_tell_which_of_several_stages_findings_came_first() -> None:
    words = [
        "the weight tokens.weight",
        "the output of blocks.0.norm_1",
        "the output of blocks.11",
        "the loss",
    ]
    assert [_depth(f"{one} is not finite") for one in words] == sorted(_depth(one) for one in words)
    assert len({_depth(one) for one in words}) == 4


def test_the_line_of_a_step_says_the_cause() -> None:
    done = StepDone(3, 9, float("nan"), 1e-3, float("nan"), 1, 1.0, 1.0, True, cause="the loss is not finite")
    assert step_line(done).endswith("| skipped: the gradient is not finite | the loss is not finite")


def test_a_step_that_is_finite_when_repeated_is_taken_and_suspects_the_device(
    tmp_path: Path,
    train_here: Callable[..., Any],
    metrics: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainer.engine import torch_engine

    whole, calls = torch_engine.TorchEngine.step, iter(range(99))

    def flips(self: Any, *given: Any) -> StepResult:
        if next(calls) == 2:
            return StepResult(float("nan"), float("nan"), 128, skipped=True)
        return whole(self, *given)

    train_here(tmp_path / "plain")
    monkeypatch.setattr(torch_engine.TorchEngine, "step", flips)
    train_here(tmp_path / "flipped")
    plain, flipped = (metrics(tmp_path / name, "step") for name in ("plain", "flipped"))
    assert [line["loss"] for line in plain] == [line["loss"] for line in flipped]
    assert "suspect the device" in flipped[2]["cause"] and not flipped[2]["skipped"]


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"pipeline": 2}])
def test_ranks_agree_on_the_first_cause_and_the_training_ends_by_it(
    parallel: dict[str, int],
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    run_ranks: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
) -> None:
    config = raw_config(
        steps=60,
        optimizer={"lr": 1e30, "clip": 0.0},
        save={"every": 0},
        parallel=parallel,
        nan={"stop_after": 3},
    )
    done = run_ranks(2, config, tmp_path)
    assert [rank.returncode for rank in done] == [1, 1]
    failed = metrics(tmp_path)[-1]
    assert (
        failed["event"] == "failed"
        and "no finite loss or gradient in 3 steps up to step" in failed["message"]
    )
    assert ": at step 2 the " in failed["message"] and " is not finite on rank 0 (" in failed["message"]
    for rank in done:
        assert f"error: {failed['message']}" in rank.stderr and "Traceback" not in rank.stderr
    lost = [line for line in metrics(tmp_path, "step") if line["skipped"] or line["loss"] is None]
    assert len(lost) == 3 and lost[0]["cause"] and not lost[1]["cause"]
