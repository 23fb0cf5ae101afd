from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import native
from trainer.config.model import ModelConfig
from trainer.model.gpt import GPT

CONFIG = ModelConfig(layers=2, hidden=32, heads=2, sequence=16, vocab=60)


@pytest.fixture
def model() -> GPT:
    return GPT(CONFIG, native.choose("cpu", "reference"), seed=3)


def test_the_parameters_are_as_many_as_the_arithmetic_says(model: GPT) -> None:
    padding = (CONFIG.padded_vocab - CONFIG.vocab) * CONFIG.hidden
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIG.parameters() + padding


def test_a_fresh_model_knows_nothing(model: GPT) -> None:
    tokens = torch.randint(0, CONFIG.vocab, (8, 17), generator=torch.Generator().manual_seed(1))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(CONFIG.vocab), abs=0.1)


def test_the_loss_is_that_of_the_logits(model: GPT) -> None:
    tokens = torch.randint(0, CONFIG.vocab, (3, 17))
    logits = model(tokens[:, :-1])
    assert logits.shape == (3, 16, CONFIG.vocab)
    by_hand = F.cross_entropy(logits.reshape(-1, CONFIG.vocab), tokens[:, 1:].reshape(-1))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_no_position_sees_what_comes_after_it(model: GPT) -> None:
    tokens = torch.randint(0, CONFIG.vocab, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % CONFIG.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10]) and not torch.equal(before[0, 10:], after[0, 10:])


def test_padded_rows_get_no_gradient_so_they_stay_zero(model: GPT) -> None:
    tokens = torch.randint(0, CONFIG.vocab, (2, 17))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    table = model.tokens.weight
    assert table.grad is not None
    assert not table[CONFIG.vocab :].any() and not table.grad[CONFIG.vocab :].any()
    assert table.grad[: CONFIG.vocab].any()


def test_what_writes_into_the_residual_starts_smaller() -> None:
    config = ModelConfig(layers=8, hidden=128, heads=4)
    model = GPT(config, native.choose("cpu", "reference"))
    block = model.blocks["0"]
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_one_seed_gives_one_model_whatever_torch_was_seeded_with() -> None:
    models = []
    for other in (1, 2):
        torch.manual_seed(other)
        models.append(GPT(CONFIG, native.choose("cpu", "reference"), seed=3))
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
