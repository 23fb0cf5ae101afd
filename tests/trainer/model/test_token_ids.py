"""A token id that the model does not have is refused with the same words in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.corpus.indexed import Writer, bin_path, manifest_path
from trainer.errors import DataError
from trainer.model.token_ids import check_token_ids


@pytest.fixture
def lying_corpus(tmp_path: Path) -> Path:
    """A corpus with the id 75, which its manifest does not know: it was changed after its build."""
    prefix = tmp_path / "lying"
    with Writer(prefix, np.uint16) as writer:
        for _ in range(60):
            writer.add_document([list(range(40)) + [75] * 10])
    output = {"bytes": bin_path(prefix).stat().st_size, "sha256": "0" * 64}
    manifest = {"vocab": 60, "largest_id": 59, "outputs": {"bin": output}}
    manifest_path(prefix).write_text(json.dumps(manifest))
    return prefix


@pytest.mark.parametrize("engine", ["torch", pytest.param("deepspeed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {}, id="alone"),
        pytest.param(2, {"parallel": {"tensor": 2}}, id="tensor"),
        pytest.param(2, {"parallel": {"pipeline": 2}, "micro_batch": 4}, id="pipeline"),
    ],
)
def test_an_id_beyond_the_vocabulary_ends_the_training_with_one_message(
    ranks: int,
    changes: dict[str, Any],
    engine: str,
    lying_corpus: Path,
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    run_ranks: Callable[..., Any],
) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    data = {"prefix": str(lying_corpus), "split": "80,20,0"}
    done = run_ranks(ranks, raw_config(data=data, engine=engine, **changes), tmp_path / "run")
    assert all(rank.returncode != 0 for rank in done)
    message = "a batch has token id 75, but the model's ids are 0 to 59"
    assert any(message in rank.stderr for rank in done) and "Traceback" not in done[0].stderr


@pytest.mark.parametrize("ids", [[0, 60], [-1, 3]])
def test_both_ends_are_checked(ids: list[int]) -> None:
    check_token_ids(torch.tensor([0, 59]), 60)
    check_token_ids(torch.tensor([], dtype=torch.int64), 60)
    with pytest.raises(DataError, match=f"token id {ids[0] if ids[0] < 0 else ids[1]}"):
        check_token_ids(torch.tensor(ids), 60)
