"""GLM as a model, and from a config to its losses: one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import native
from native.reference import hidden
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.corpus.tokenizer import Tokenizer, add_glm_tokens, train_tokenizer
from trainer.errors import DataError, InputError
from trainer.generate.loading import open_decoder
from trainer.model.glm import GLM
from trainer.plan.resolve import read_config, try_config
from trainer.samples.dataset import Data
from trainer.samples.glm_batches import GlmMix, glm_batches, tokens_of

Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]
TrainHere = Callable[..., Any]

SHAPE = {"kind": "glm", "layers": 2, "hidden": 32, "heads": 4, "sequence": 48, "vocab": 69}
CONFIG = ModelConfig(**SHAPE)  # type: ignore[arg-type]
GLM_DATA = {"split": "80,20,0", "eod": 3}


@pytest.fixture
def model() -> GLM:
    return GLM(CONFIG, native.choose("cpu", "reference"), seed=3).eval()


@pytest.fixture
def raw(prefix: Path, raw_config: Make) -> Make:
    def make(**changes: Any) -> dict[str, Any]:
        data = {"prefix": str(prefix), **GLM_DATA}
        return raw_config(**{"model": dict(SHAPE), "data": data, **changes})

    return make


def row_of(length: int, source: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A row's tokens, positions (one span behind the source) and separator."""
    tokens = torch.randint(0, 60, (1, length), generator=torch.Generator().manual_seed(seed))
    at = torch.arange(length)
    first = at.clamp(max=source - 1)
    return tokens, torch.stack([first, (at - source + 1).clamp(min=0)])[None], torch.tensor([source])


def test_the_parameters_are_as_many_as_the_arithmetic_says(model: GLM) -> None:
    padding = (CONFIG.padded_vocab - CONFIG.vocab) * CONFIG.hidden
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIG.parameters() + padding
    assert model.positions.weight.shape == model.block_positions.weight.shape == (49, 32)


def test_what_is_unseen_is_later_and_not_of_the_source() -> None:
    expected = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    mask = native.Mask(source=torch.tensor([2]))
    assert hidden(mask, 4, 4, torch.device("cpu"))[0, 0].int().tolist() == expected


def test_the_source_sees_all_of_itself_and_nothing_of_the_blanks(model: GLM) -> None:
    tokens, positions, separators = row_of(12, 7)
    before = model(tokens, positions, separators)
    blank, source = tokens.clone(), tokens.clone()
    blank[0, 9] = (blank[0, 9] + 1) % 60
    source[0, 6] = (source[0, 6] + 1) % 60
    after = model(blank, positions, separators)
    assert torch.equal(before[0, :9], after[0, :9])
    assert (before[0, 9:] != after[0, 9:]).any(-1).all()
    assert (before[0] != model(source, positions, separators)[0]).any(-1).all()


def test_both_rows_of_positions_count(model: GLM) -> None:
    tokens, positions, separators = row_of(12, 7)
    for row in (0, 1):
        changed = positions.clone()
        changed[0, row, 11] += 1
        before, after = model(tokens, positions, separators), model(tokens, changed, separators)
        assert torch.equal(before[0, :11], after[0, :11]) and not torch.equal(before[0, 11], after[0, 11])


def test_the_loss_is_that_of_the_tokens_behind_the_source_and_padding_changes_nothing(model: GLM) -> None:
    tokens, positions, separators = row_of(12, 7)
    targets = torch.randint(0, 60, (1, 12))
    mask = (torch.arange(12) >= 7).float()[None]
    loss = model(*model.arguments((tokens, targets, mask, positions, separators)))
    logits = model(tokens, positions, separators)
    assert loss.item() == pytest.approx(F.cross_entropy(logits[0, 7:], targets[0, 7:]).item(), rel=1e-6)
    padded = [F.pad(part, (0, 5)) for part in (tokens, targets, mask, positions)]
    assert model(*model.arguments((*padded, separators))).item() == pytest.approx(loss.item(), rel=1e-6)


def test_a_glm_learns_and_a_resume_gives_the_losses_of_one_run(
    tmp_path: Path, raw: Make, train_here: TrainHere, metrics: Read
) -> None:
    changes = raw(steps=40, save={"every": 20}, precision="bf16")
    train_here(tmp_path / "whole", **changes)
    evals = [line["loss"] for line in metrics(tmp_path / "whole", "eval")]
    assert evals[0] == pytest.approx(math.log(69), abs=0.1) and evals[-1] < evals[0] - 0.3
    stopped = train_here(tmp_path / "parts", stop_after=13, **changes)
    assert stopped.stopped and stopped.step == 13
    train_here(tmp_path / "parts", **changes)
    whole, parts = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name, "step")]
        for name in ("whole", "parts")
    )
    assert whole == parts and len(whole) == 40
    assert metrics(tmp_path / "whole", "step")[-1]["tokens"] == 40 * 8 * 48


def test_every_fault_of_a_glm_job_is_told_at_once(raw: Make) -> None:
    wrong = raw(
        data={
            "prefix": "x",
            "mask_eod_loss": True,
            "eod": 62,
            "infilling": {"words": 0.8, "sentences": 0.4, "hide": 2},
            "windows": {"short_chance": 1.5},
        }
    )
    faults = {fault.key for fault in try_config(wrong, 1)[1]}
    assert faults == {
        "train.data.mask_eod_loss",
        "train.data.eod",
        "train.data.infilling",
        "train.data.infilling.hide",
        "train.data.windows.short_chance",
    }
    nothing = {fault.key for fault in try_config(raw(data={"prefix": "x"}), 1)[1]}
    assert nothing == {"train.data.tokenizer"}


def test_what_is_glms_is_refused_for_a_gpt(raw_config: Make) -> None:
    _, faults = try_config(raw_config(data={"prefix": "x", "infilling": {"words": 0.7}}), 1)
    assert [fault.key for fault in faults] == ["train.data.infilling"]


def test_ids_of_the_data_that_are_glms_own_are_refused(
    tmp_path: Path, raw: Make, train_here: TrainHere
) -> None:
    with pytest.raises(DataError) as caught:
        train_here(tmp_path, **raw(model={**SHAPE, "vocab": 60}))
    assert "GLM's special tokens begin at 51" in caught.value.message


def test_a_tokenizer_with_glms_tokens_is_used_as_it_is(
    tmp_path: Path, prefix: Path, raw: Make, train_here: TrainHere
) -> None:
    train_tokenizer(iter(["a word. another one. and more?"] * 9), 260, tmp_path / "plain")
    add_glm_tokens(tmp_path / "plain", tmp_path / "glm")
    plain, laid = (Tokenizer.load(tmp_path / name) for name in ("plain", "glm"))
    assert tokens_of(plain, plain.eod) == tokens_of(laid, laid.eod)
    data = {"prefix": str(prefix), "split": "80,20,0", "tokenizer": str(tmp_path / "glm" / "tokenizer.json")}
    with pytest.raises(InputError, match=str(laid.vocab)):
        train_here(tmp_path / "run", **raw(data=data))
    train_here(tmp_path / "run", **raw(data=data, model={**SHAPE, "vocab": laid.vocab}, steps=3, save={}))


def test_several_corpora_are_mixed_by_their_weights(prefix: Path, raw: Make) -> None:
    blend = [{"prefix": str(prefix), "weight": 3}, {"prefix": str(prefix), "weight": 1}]
    config = read_config(raw(data={"blend": blend, **GLM_DATA}), 1)
    mix = glm_batches(config, Data(config.data, 48))["train"]
    assert isinstance(mix, GlmMix)
    seen: list[int] = []
    for place, part in enumerate(mix.parts):
        part.row = lambda number, place=place: seen.append(place)  # type: ignore[method-assign,misc,assignment]
    for number in range(400):
        mix.row(number)
    assert 0.68 < seen.count(0) / 400 < 0.82


def test_the_tiny_glm_is_a_named_size_with_room_for_its_positions() -> None:
    tiny = SIZES["glm-tiny"]
    model = GLM(tiny, native.choose("cpu", "reference"))
    assert np.prod(model.positions.weight.shape) == (tiny.sequence + 1) * tiny.hidden


def test_a_glms_checkpoint_without_a_tokenizer_wants_one(
    tmp_path: Path, raw: Make, train_here: TrainHere
) -> None:
    train_here(tmp_path, **raw(steps=3, eval={"batches": 0}))
    with pytest.raises(InputError, match="contains no tokenizer"):
        open_decoder(tmp_path / "checkpoints" / "step-00000003")


def test_other_rules_of_blanking_are_noted_at_a_resume(
    tmp_path: Path, prefix: Path, raw: Make, train_here: TrainHere, metrics: Read
) -> None:
    train_here(tmp_path, stop_after=3, **raw())
    other = {"prefix": str(prefix), **GLM_DATA, "infilling": {"words": 0.9, "sentences": 0.1}}
    train_here(tmp_path, **raw(data=other))
    first, second = (line["notes"] for line in metrics(tmp_path, "start"))
    assert len(first) == 1 and "each document counts as one sentence" in first[0]
    assert any("order of samples" in note for note in second)
