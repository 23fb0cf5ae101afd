"""fp16's loss scale: the order of its moves, and a training that calibrates it by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import native
from trainer.config.layout import Layout
from trainer.config.model import ModelConfig
from trainer.config.parts import LossScaleConfig
from trainer.device import Device
from trainer.engine.optimizer import LossScale
from trainer.engine.torch_engine import TorchEngine
from trainer.model.gpt import GPT
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import read_config

Make = Callable[..., dict[str, Any]]


def test_it_halves_after_overflows_and_doubles_after_a_clean_window() -> None:
    scale = LossScale(LossScaleConfig(initial=16.0, window=2, hysteresis=2, least=2.0))
    told = []
    for overflow in (True, True, True, False, False, True, True, True, True):
        scale.update(overflow)
        told.append(scale.value)
    # The first overflow is let pass; every further one halves, until a whole clean window.
    assert told == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 4.0, 2.0, 2.0]
    assert not scale.can_fall


def test_a_fixed_one_stays_and_a_moving_one_goes_on_where_it_was() -> None:
    fixed = LossScale(LossScaleConfig(initial=128.0, dynamic=False))
    fixed.update(overflow=True)
    assert fixed.value == 128.0 and not fixed.can_fall
    moved, resumed = (LossScale(LossScaleConfig(initial=64.0, window=3)) for _ in range(2))
    for overflow in (True, True, False):
        moved.update(overflow)
    resumed.load(moved.state())
    for one in (moved, resumed):
        one.update(overflow=False)
    assert resumed.state() == moved.state() and moved.value == 32.0


@pytest.fixture
def engine_of(raw_config: Make) -> Callable[[str], TorchEngine]:
    shape = ModelConfig(layers=1, hidden=16, heads=2, sequence=8, vocab=60)

    def make(precision: str) -> TorchEngine:
        raw = raw_config(
            model={key: getattr(shape, key) for key in ("layers", "hidden", "heads", "sequence", "vocab")}
        )
        config = replace(read_config(raw), precision=precision, loss_scale=LossScaleConfig(initial=2.0**24))
        device = Device("cpu")
        group = Group(0, 1, device)
        model = GPT(config.model, native.choose("cpu"), seed=3)
        return TorchEngine(model, config, Groups.of(group, Layout.of(1, 1, 1)), device)

    return make


def test_a_training_calibrates_and_then_learns_as_in_fp32(engine_of: Callable[[str], TorchEngine]) -> None:
    tokens = torch.randint(0, 60, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = [(tokens[:2],), (tokens[2:],)]
    half, full = engine_of("fp16"), engine_of("fp32")
    assert {one.dtype for one in half.runner.model.parameters()} == {torch.float16, torch.float32}
    first = half.step(batch, 1e-2, 1)
    assert first.skipped and first.calibrating and first.loss_scale == 2.0**24
    while first.skipped:
        first = half.step(batch, 1e-2, 1)
    assert 1.0 < (first.loss_scale or 0.0) < 2.0**24 and not first.calibrating
    right = full.step(batch, 1e-2, 1)
    for _ in range(4):
        assert first.loss == pytest.approx(right.loss, rel=2e-3)
        assert first.grad_norm == pytest.approx(right.grad_norm, rel=2e-2)
        first, right = half.step(batch, 1e-2, 1), full.step(batch, 1e-2, 1)
    assert right.loss_scale is None and right.loss < 4.0
