"""Weights are drawn only where no checkpoint has them, and then every one of them is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from tests.trainer.conftest import MODEL
from trainer.config.lora import LoraConfig
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.model.adapter import adapt
from trainer.parallel.group import Group, Groups
from trainer.parallel.tensor import ALONE
from trainer.plan.resolve import read_config
from trainer.train import assemble, draw
from trainer.train.assemble import build_model

Read = Callable[..., list[dict[str, Any]]]
TrainHere = Callable[..., Any]
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "experts": {"experts": 4, "top_k": 2, "ffn": 32, "shared_ffn": 16, "rotary": True, "tied": False},
    "llama-bf16": {"rotary": True, "norm": "rms", "bias": "none", "swiglu": True, "qk_norm": True},
    "glm": {"kind": "glm", "vocab": 70},
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all weights of a model with NaN until they are drawn or loaded; forbid to draw the whole of it."""
    build = assemble.build_model

    def build_poisoned(*given: Any, drawn: bool = True) -> Any:
        assert not drawn
        model = build(*given, drawn=drawn)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        return model

    monkeypatch.setattr(assemble, "build_model", build_poisoned)


def refuse(*_: object) -> None:
    raise AssertionError("a weight was drawn that the checkpoint has")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["resume", "init"])
def test_a_checkpoint_fills_every_weight(
    family: str,
    how: str,
    prefix: Path,
    tmp_path: Path,
    train_here: TrainHere,
    metrics: Read,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    precision = "bf16" if family.endswith("bf16") else "fp32"
    common = {"model": {**MODEL, **FAMILIES[family]}, "steps": 3, "precision": precision}
    if family == "glm":
        common["data"] = {"prefix": str(prefix), "eod": 59}
    train_here(tmp_path / "first", stop_after=2, **common)
    request.getfixturevalue("poisoned")
    monkeypatch.setattr(draw, "drawn_matrix", refuse)
    folder = tmp_path / "first"
    if how == "init":
        folder = tmp_path / "next"
        common["init"] = str(tmp_path / "first")
    train_here(folder, **common)
    assert metrics(folder, "step")[-1]["step"] == 3
    assert 3.2 < metrics(folder, "step")[-1]["loss"] < 4.5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("init", [{}, {"source": "x", "extend_vocabulary": True}], ids=["new", "from-source"])
def test_what_no_source_has_is_drawn_as_a_model_draws_it(
    family: str, init: dict[str, Any], raw_config: Callable[..., dict[str, Any]]
) -> None:
    raw = raw_config(model={**MODEL, **FAMILIES[family]}, init=init)
    raw["data"] |= {"eod": 59} if family == "glm" else {}
    config, ops, group = read_config(raw, 1), native.choose("cpu", "reference"), Group(0, 1, Device("cpu"))
    if init:
        changes = {"rank": 2, "targets": ("qkv", "out")}
        config = replace(config, tune=replace(config.tune, lora=LoraConfig(**changes)))
    groups = Groups(group, group, ALONE)
    wanted, model = (build_model(config, ops, groups, drawn=drawn) for drawn in (True, False))
    if init:
        for each, seed in ((wanted, config.seed), (model, None)):
            adapt(each, config.model, config.tune.lora, seed)
    draw.draw(config, TorchEngine(model, config, groups, Device("cpu")))
    drawn = set()
    for (name, parameter), expected in zip(model.named_parameters(), wanted.parameters(), strict=True):
        lacking = not init or ".adapter." in name or name in draw.TABLES
        assert torch.equal(
            parameter, expected if lacking or parameter.dim() < 2 else torch.zeros_like(expected)
        )
        drawn |= {name} if parameter.any() and parameter.dim() > 1 else set()
    assert len(drawn) >= 5
