"""What an end of document does to the rest of its sample: by hand, and through the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from native.reference import hidden
from trainer.config.model import ModelConfig
from trainer.model import masks
from trainer.model.gpt import GPT
from trainer.model.masks import Ends
from trainer.plan.resolve import try_config

EOD = 9
INPUTS = torch.tensor([[1, 2, EOD, 3, EOD, EOD, 4, 5]])


def test_masks_by_hand() -> None:
    assert masks.counted(INPUTS, INPUTS + 10, EOD).tolist() == [[11, 12, -100, 13, -100, -100, 14, 15]]
    assert masks.positions(INPUTS, EOD).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert masks.documents(INPUTS, EOD).tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]
    mask = native.Mask(documents=masks.documents(INPUTS, EOD))
    seen = ~hidden(mask, 8, 8, INPUTS.device)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [3],
        [3, 4],
        [5],
        [6],
        [6, 7],
    ]


@pytest.fixture
def model() -> Callable[[Ends | None], GPT]:
    shape = ModelConfig(layers=2, hidden=32, heads=2, sequence=8, vocab=12)
    return lambda ends: GPT(shape, native.choose("cpu", "reference"), 1, ends)


def test_a_document_is_computed_as_if_it_were_alone(model: Callable[[Ends | None], GPT]) -> None:
    together = model(Ends(EOD, positions=True, attention=True))(INPUTS)
    for start, stop in ((0, 3), (3, 5), (5, 6), (6, 8)):
        alone = model(None)(INPUTS[:, start:stop])
        torch.testing.assert_close(together[:, start:stop], alone)
    assert not torch.allclose(model(None)(INPUTS)[:, 3:5], model(None)(INPUTS[:, 3:5]))


def test_what_follows_an_end_is_left_out_of_the_loss(model: Callable[[Ends | None], GPT]) -> None:
    targets = INPUTS.roll(-1, 1)
    changed = targets.clone()
    changed[0, [2, 4, 5]] = 7
    losses = [model(Ends(EOD, loss=True))(INPUTS, one).item() for one in (targets, changed)]
    assert losses[0] == losses[1]
    plain = [model(None)(INPUTS, one).item() for one in (targets, changed)]
    assert plain[0] != plain[1]


def test_a_training_with_all_of_them_learns_and_resumes_to_the_last_bit(
    tmp_path: Path, train_here: Callable[..., Any], prefix: Path, metrics: Callable[..., list[dict[str, Any]]]
) -> None:
    flags = {"mask_eod_loss": True, "reset_positions": True, "reset_attention": True, "eod": EOD}
    data = {"prefix": str(prefix), "split": "80,20,0", **flags}
    whole = train_here(tmp_path / "whole", data=data, steps=20)
    assert train_here(tmp_path / "parts", data=data, steps=20, stop_after=7).stopped
    assert train_here(tmp_path / "parts", data=data, steps=20).eval_loss == whole.eval_loss
    evals = metrics(tmp_path / "whole", "eval")
    assert evals[-1]["loss"] < evals[0]["loss"] - 0.2
    assert not any("torch's attention" in note for note in metrics(tmp_path / "whole", "start")[0]["notes"])


def test_an_end_that_nothing_names_or_that_is_no_token_is_a_fault(
    raw_config: Callable[..., dict[str, Any]],
) -> None:
    _, faults = try_config(raw_config(data={"prefix": "x", "reset_positions": True}), 1)
    assert [fault.key for fault in faults] == ["train.data.eod"]
    _, faults = try_config(raw_config(data={"prefix": "x", "eod": 60}), 1)
    assert "60 is no token of a model of 60" in faults[0].what
