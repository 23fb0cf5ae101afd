"""Two trainings of one seed give the same bytes: losses, norms, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = {"layers": 2, "hidden": 128, "heads": 4, "sequence": 64, "vocab": 60, "dropout": 0.1}


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {"precision": "bf16", "recompute": "full"}, id="bf16-recompute"),
        pytest.param(2, {"parallel": {"tensor": 2, "sequence": True}}, id="tensor2-sequence"),
        pytest.param(2, {"zero": 1, "precision": "bf16", "seed": 7}, id="data2-zero1-bf16"),
    ],
)
def test_the_same_seed_gives_the_same_bytes_on_two_threads_a_rank(
    ranks: int,
    changes: dict[str, Any],
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    run_ranks: Callable[..., Any],
    metrics: Callable[..., list[dict[str, Any]]],
) -> None:
    config = raw_config(model=MODEL, steps=4, eval={"batches": 1}, save={"every": 2}, **changes)
    seen = []
    for name in ("a", "b"):
        done = run_ranks(ranks, config, tmp_path / name, OMP_NUM_THREADS="2")
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
        said = [
            (line["step"], line["loss"], line["grad_norm"], line["lr"])
            for line in metrics(tmp_path / name, "step")
        ]
        evals = [(line["step"], line["loss"]) for line in metrics(tmp_path / name, "eval")]
        files = sorted((tmp_path / name / "checkpoints").glob("step-*/*.safetensors"))
        assert len(said) == 4 and len(files) == 2 * ranks
        seen.append((said, evals, [(file.name, file.read_bytes()) for file in files]))
    assert seen[0] == seen[1]
    assert metrics(tmp_path / "a", "start")[0]["threads"] == 2
