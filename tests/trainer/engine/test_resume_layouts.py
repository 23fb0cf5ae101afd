"""A training resumed in its own layout gives the same bytes: losses, norms, and the last checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., Any]
Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]

GLM = {"kind": "glm", "layers": 2, "hidden": 32, "heads": 4, "sequence": 48, "vocab": 69, "dropout": 0.1}
GPT = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 60, "dropout": 0.1}
CASES = [
    pytest.param(
        GPT, 4, {"parallel": {"tensor": 2, "sequence": True}, "zero": 1}, id="gpt-2x2-sequence-zero1"
    ),
    pytest.param(GLM, 2, {"zero": 3, "precision": "bf16"}, id="glm-data2-zero3-bf16"),
]


@pytest.mark.parametrize(("model", "ranks", "changes"), CASES)
def test_the_second_half_again_is_the_same_to_the_last_bit(
    model: dict[str, Any],
    ranks: int,
    changes: dict[str, Any],
    tmp_path: Path,
    prefix: Path,
    raw_config: Make,
    run_ranks: Ranks,
    metrics: Read,
) -> None:
    data: dict[str, Any] = {"prefix": str(prefix), "split": "80,20,0"}
    data |= {"eod": 3} if model is GLM else {}
    config = raw_config(model=model, data=data, eval={"batches": 0}, save={"every": 4, "keep": 9}, **changes)

    def trained() -> tuple[list[tuple[float, float]], dict[str, Any]]:
        done = run_ranks(ranks, config, tmp_path)
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
        steps = [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path, "step")]
        return steps, json.loads((tmp_path / "checkpoints/step-00000008/manifest.json").read_text())["files"]

    whole, files = trained()
    assert len(whole) == 8
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    (tmp_path / "metrics.jsonl").unlink()
    assert trained() == (whole[4:], files)
