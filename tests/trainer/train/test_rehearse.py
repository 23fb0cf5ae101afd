"""One rank of a large layout takes a step here and uses the memory that the plan predicts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from trainer.plan.memory import LIBRARIES

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"model": "gpt2-124M", "micro_batch": 2}),
    (
        1536,
        {
            "model": "gpt3-175B",
            "micro_batch": 1,
            "global_batch": 1536,
            "parallel": {"tensor": 8, "pipeline": 16},
        },
    ),
    (32, {"model": "gpt2-13B", "micro_batch": 2, "global_batch": 192, "zero": 1, "recompute": "full"}),
    (8, {"model": "glm-large", "micro_batch": 2, "parallel": {"tensor": 2, "sequence": True}}),
    (8, {"model": "gpt2-345M", "micro_batch": 2, "zero": 3}),
    # The whole model in fp32 has 51 GB, a rank needs 8 GB: no rank may hold the whole model at any time.
    (16, {"model": "gpt2-13B", "micro_batch": 1, "zero": 3, "recompute": "full"}),
]


# Without AVX-512 the rank of 175B takes 40 s of a core, and longer on a busy machine.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world", "train"), CASES, ids=["alone", "175B", "13B", "glm", "zero 3", "13B-zero-3"]
)
def test_a_rank_is_built_and_stepped_without_memory(world: int, train: dict[str, Any]) -> None:
    whole = {"steps": 1, "precision": "bf16", "data": {"prefix": "x", "tokenizer": "t"}, **train}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "rehearse"],
        input=json.dumps({"train": whole, "world_size": world}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["parameters"] == answer["planned_parameters"]
    # And gloo's copies, with ZeRO 3.
    tensors = answer["planned_bytes"] - LIBRARIES
    assert answer["peak_bytes"] == pytest.approx(tensors, rel=0.1)
    assert bool(answer["exchanges"]) == (world > 1)


def test_a_job_that_makes_no_sense_is_refused_before_torch_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "rehearse"],
        input=json.dumps({"train": {"model": "gpt9"}, "world_size": 1}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "there is no model" in done.stderr
