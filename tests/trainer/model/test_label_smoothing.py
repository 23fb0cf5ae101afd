from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import native
from trainer.config.model import ModelConfig
from trainer.model.gpt import GPT
from trainer.model.layers import TokenTable
from trainer.parallel.tensor import ALONE

CONFIG = ModelConfig(layers=1, hidden=16, heads=2, sequence=8, vocab=30, vocab_multiple=32)
SMOOTHING = 0.1


def expected(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = x.flatten(0, 1) @ weight[: CONFIG.vocab].T
    return F.cross_entropy(logits, targets.flatten(), label_smoothing=SMOOTHING)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    targets = torch.randint(0, CONFIG.vocab, (2, 8))
    # Some do not count.
    targets[0, :3] = -100
    return torch.randn(2, 8, 16, requires_grad=True), targets


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_smoothed_loss_and_its_gradients_are_those_of_torch(backend: str) -> None:
    table = TokenTable(CONFIG, native.choose("cpu", backend), ALONE)
    torch.nn.init.normal_(table.weight)
    x, targets = data()
    (plain := expected(x, table.weight, targets)).backward()
    wanted = x.grad, table.weight.grad
    x.grad = table.weight.grad = None
    (loss := table.loss(x, targets, SMOOTHING)).backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close((x.grad, table.weight.grad), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_smoothed_loss_of_columns_is_that_of_torch(backend: str) -> None:
    weight = torch.randn(CONFIG.vocab, 16, requires_grad=True)
    x, targets = data()
    (plain := expected(x, weight, targets)).backward()
    wanted, weight.grad = weight.grad, None
    logits = x.detach().flatten(0, 1) @ weight.T
    ops, part = native.choose("cpu", backend), native.VocabularyPart(CONFIG.vocab)
    (loss := ops.vocabulary_cross_entropy(logits, targets.flatten(), part, SMOOTHING)).backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-4, atol=1e-6)


def test_labels_are_smoothed_in_training_only_and_the_table_is_padded_as_asked() -> None:
    smoothed = ModelConfig(**{**CONFIG.__dict__, "label_smoothing": SMOOTHING})
    plain, model = (GPT(config, native.choose("cpu"), seed=1) for config in (CONFIG, smoothed))
    assert len(model.tokens.weight) == 32
    tokens = torch.randint(0, CONFIG.vocab, (2, 8))
    in_training, usual = model(tokens, tokens), plain(tokens, tokens)
    assert abs(in_training.item() - usual.item()) > 1e-4
    assert model.eval()(tokens, tokens).item() == usual.item()
