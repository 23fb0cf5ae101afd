"""Detect every change that alters the numbers of a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import golden


@pytest.mark.parametrize("model", golden.MODELS)
def test_the_first_losses_are_those_that_were_kept(model: str, tmp_path: Path) -> None:
    kept = json.loads(golden.GOLDENS.read_text())
    found = golden.losses(model, tmp_path / "plain", "reference")
    assert len(found) == golden.STEPS
    for step, (now, then) in enumerate(zip(found, kept[model], strict=True), 1):
        assert now == {key: pytest.approx(value, rel=1e-6) for key, value in then.items()}, step
    for now, then in zip(golden.losses(model, tmp_path / "fused", "auto"), kept[model], strict=True):
        assert now["loss"] == pytest.approx(then["loss"], rel=1e-5)
