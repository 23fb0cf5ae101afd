"""Micro-batches as captured graphs: the same bits as op by op, and what cannot be captured runs as before."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import native
from native import reference
from tests.support.cpu_graph import RecordedGraph, RecordingDevice
from trainer.config.layout import Layout
from trainer.config.parts import LossScaleConfig
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine import captured, compiled
from trainer.engine.captured import CapturedRunner
from trainer.engine.torch_engine import StepResult, TorchEngine
from trainer.model import gpt
from trainer.model.gpt import GPT
from trainer.model.layers import TokenTable
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import try_config

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 64}
EXPERTS = {"experts": 4, "top_k": 2, "bias": "none", "swiglu": True, "aux_loss": 0.02}
LLAMA = {"rotary": True, "norm": "rms", "swiglu": True, "bias": "none", "query_groups": 2, "tied": False}


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on a CPU too; the tokens' dropout draws from the generator of the seeds there."""
    monkeypatch.setattr(TrainConfig, "captures", lambda self, kind: self.compile == "graph")
    monkeypatch.setattr(gpt.F, "dropout", lambda x, *_: x)
    # The loss of a CPU reads the weight of its gradient; on a device a kernel does that.
    monkeypatch.setattr(gpt.GPT, "_loss_of", lambda self, x: partial(loss_of, self.head, x))


def loss_of(head: TokenTable, x: Tensor, targets: Tensor) -> Tensor:
    return reference.linear_cross_entropy(
        x.flatten(0, 1), head.output_matrix(), targets.flatten(), head.vocab
    )


def config_of(precision: str = "fp32", compiled: str = "graph", **model: Any) -> TrainConfig:
    config, faults = try_config(
        {"model": {**SHAPE, **model}, "steps": 9, "data": {"prefix": "x"}, "compile": compiled}, 1
    )
    assert not faults, faults
    return replace(config, precision=precision, loss_scale=LossScaleConfig(initial=8.0))


def engine_of(config: TrainConfig, device: Device) -> TorchEngine:
    model = GPT(config.model, native.choose("cpu"), seed=3)
    return TorchEngine(model, config, Groups.of(Group(0, 1, device), Layout.of(1, 1, 1)), device)


def batches(steps: int, micros: int, length: int = 17) -> list[list[tuple[Tensor]]]:
    drawn = torch.randint(0, 64, (steps, micros, 2, length), generator=torch.Generator().manual_seed(1))
    return [[(micro,) for micro in step] for step in drawn]


def trained(engine: TorchEngine, given: Sequence[Any]) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Return the loss and norm of each step, and the weights and moments after the last one."""
    results = [engine.step(batch, 1e-2, seed) for seed, batch in enumerate(given)]
    state = [*engine.model.parameters(), *engine.rank_state.optimizer.moments.values()]
    return [(each.loss, each.grad_norm) for each in results], [x.detach().clone() for x in state]


def same(first: Any, second: Any) -> bool:
    return first[0] == second[0] and all(torch.equal(x, y) for x, y in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "model",
    [{}, {"dropout": 0.2}, LLAMA, {"window": 5}, EXPERTS, {**EXPERTS, "capacity": 0.75}],
    ids=["gpt", "dropout", "llama", "window", "experts", "capacity"],
)
def test_captured_steps_are_those_op_by_op_to_the_last_bit(
    model: dict[str, Any], precision: str, micros: int
) -> None:
    if "experts" in model and precision == "bf16":
        pytest.skip("the stand-in's dispatch mode alone changes the last bit of a product of few rows")
    device = RecordingDevice("cpu")
    engine = engine_of(config_of(precision, **model), device)
    assert isinstance(engine.runner, CapturedRunner)
    given = batches(5, micros)
    right = trained(engine_of(config_of(precision, "off", **model), Device("cpu")), given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = trained(engine, given)
    assert same(found, right)
    # The first pass of each kind runs op by op: the step's only pass, or one that writes and one that adds.
    assert [graph.replays for graph in device.graphs] == ([4] if micros == 1 else [9, 4])


def test_an_evaluation_between_steps_and_other_shapes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST", 2)
    device = RecordingDevice("cpu")
    engines = engine_of(config_of(), device), engine_of(config_of(compiled="off"), Device("cpu"))
    lengths = [17, 17, 9, 9, 13, 13, 17]
    losses = []
    for engine in engines:
        losses.append([])
        for seed, length in enumerate(lengths):
            losses[-1].append(engine.step(batches(1, 1, length)[0], 1e-2, seed).loss)
            losses[-1].append(engine.evaluate(batches(1, 2)))
    assert losses[0] == losses[1]
    # Two kinds at most; the third shape runs op by op.
    assert [graph.replays for graph in device.graphs] == [2, 1]


def test_a_pass_that_reads_a_value_runs_op_by_op_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice("cpu")
    engine = engine_of(config_of(dropout=0.2), device)
    right = trained(engine_of(config_of(compiled="off", dropout=0.2), Device("cpu")), batches(5, 3))
    embedded = engine.model._embedded

    def reading(tokens: Tensor, at: Tensor) -> Tensor:
        x = embedded(tokens, at)
        return x if float(x.detach().sum()) else x * 2

    monkeypatch.setattr(engine.model, "_embedded", reading)
    with pytest.warns(RuntimeWarning, match="run op by op, not as a captured graph: .*reads a value") as told:
        found = trained(engine, batches(5, 3))
    assert len([each for each in told if "op by op" in str(each.message)]) == 1
    assert same(found, right) and [graph.replays for graph in device.graphs] == [0]


def test_after_a_capture_that_fails_auto_compiles_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(config_of(compiled="graph"), RecordingDevice("cpu"))
    assert isinstance(engine.runner, CapturedRunner)
    engine.runner.compiles, made = True, []
    monkeypatch.setattr(compiled, "CompiledBlocks", made.append)
    embedded = engine.model._embedded

    def reading(tokens: Tensor, at: Tensor) -> Tensor:
        x = embedded(tokens, at)
        return x if float(x.detach().sum()) else x * 2

    monkeypatch.setattr(engine.model, "_embedded", reading)
    with pytest.warns(
        RuntimeWarning, match="run in compiled blocks, not as a captured graph: .*reads a value"
    ):
        trained(engine, batches(4, 1))
    assert made == [engine.model]


def test_hooks_of_modules_see_every_pass() -> None:
    device = RecordingDevice("cpu")
    engine = engine_of(config_of(), device)
    given = batches(4, 1)
    trained(engine, given[:2])
    seen = []
    engine.model.blocks["1"].register_forward_hook(lambda *_: seen.append(1))
    engine.step(given[2], 1e-2, 2)
    assert not seen
    engine.model.observed = True
    engine.step(given[3], 1e-2, 3)
    assert seen == [1] and device.graphs[0].replays == 2


class DeviceUpdate:
    """The update of the CPU as a device has it: its factor is a tensor, and NaN changes nothing."""

    def __init__(self, ops: native.Choice) -> None:
        self.run = ops.adamw

    def __call__(self, update: native.AdamWStep) -> None:
        assert isinstance(update.factor, Tensor)
        if not math.isnan(factor := float(update.factor)):
            self.run(replace(update, factor=factor))


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_an_update_that_skips_itself_is_the_update_that_the_host_decides(
    clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(skips: bool) -> tuple[list[StepResult], int, list[Tensor]]:
        config = config_of("fp16", "off")
        config = replace(
            config,
            optimizer=replace(config.optimizer, clip=clip),
            loss_scale=LossScaleConfig(initial=2.0**23),
        )
        monkeypatch.setattr(native.Choice, "reads_factor", property(lambda self: skips))
        engine = engine_of(config, Device("cpu"))
        if skips:
            engine.rank_state.optimizer.ops.adamw = DeviceUpdate(engine.rank_state.optimizer.ops)
        assert engine.rank_state.skips is skips
        results = [replace(engine.step(batch, 1e-2, 1), own_seconds=0) for batch in batches(8, 2)]
        return results, engine.optimizer_steps, [x.detach().float() for x in engine.model.parameters()]

    (own, taken, weights), (right, expected, others) = run(skips=True), run(skips=False)
    assert [each.skipped for each in own] == [each.skipped for each in right]
    assert (
        own[0].skipped and not own[-1].skipped and taken == expected == 8 - sum(each.skipped for each in own)
    )
    for one, other in zip(own, right, strict=True):
        assert (one.loss, one.loss_scale) == (pytest.approx(other.loss, rel=1e-4), other.loss_scale)
    assert all(torch.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(weights, others, strict=True))


def test_the_stand_in_undoes_what_is_captured_and_refuses_to_read() -> None:
    x, graph = torch.ones(3), RecordedGraph()
    with graph.capture():
        x.add_(1)
        y = x * 2
    assert x.tolist() == [1, 1, 1]
    graph.replay()
    graph.replay()
    assert x.tolist() == [3, 3, 3] and y.tolist() == [6, 6, 6]
    with pytest.raises(RuntimeError, match="reads a value"), RecordedGraph().capture():
        x.add_(1).sum().item()
    assert x.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("changes", "world", "reason"),
    [
        ({"parallel": {"tensor": 2}}, 2, "parallel ranks exchange"),
        ({"zero": 3}, 2, "zero is 3"),
        ({"model": {**SHAPE, "dropout": 0.1}, "recompute": "full"}, 1, "recomputation draws"),
        ({"hardware": {"kind": "cpu"}}, 1, "a CPU has no graphs"),
    ],
)
def test_a_graph_that_cannot_be_captured_is_refused_with_its_reason(
    changes: dict[str, Any], world: int, reason: str
) -> None:
    raw = {"model": SHAPE, "steps": 1, "data": {"prefix": "x"}, "compile": "graph", **changes}
    _, faults = try_config(raw, world)
    assert [(fault.key, "use compile" in fault.remedy) for fault in faults] == [("train.compile", True)]
    assert reason in faults[0].what
    assert not try_config({**raw, "compile": "auto"}, world)[1]
