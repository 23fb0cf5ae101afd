"""Small models with random weights as checkpoints of ours, for the tests of imports and exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.store import verify
from trainer.config.model import ModelConfig
from trainer.generate.loading import load_model
from trainer.weights.contents import Contents, Progress
from trainer.weights.lazy import in_memory
from trainer.weights.ours import shapes_for, write_ours
from trainer.weights.target import open_target

GPT = ModelConfig(layers=4, hidden=32, heads=4, sequence=24, vocab=300)
GLM = replace(GPT, kind="glm", positions=24)


def random_state(model: ModelConfig, moments: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Return random tensors of a model under our names."""
    random = torch.Generator().manual_seed(seed)
    shapes = shapes_for(model)
    state = {name: torch.randn(shape, generator=random) * 0.2 for name, shape in shapes.items()}
    for moment in MOMENTS if moments else ():
        state |= {f"{moment}.{name}": torch.rand(shape, generator=random) for name, shape in shapes.items()}
    return state


def checkpoint(
    path: Path, model: ModelConfig, state: dict[str, Tensor], progress: Progress = Progress()
) -> Path:
    """Write a checkpoint of ours."""
    tensors = {name: in_memory(tensor) for name, tensor in state.items()}
    contents = Contents(model, tensors, {"format": "test"}, progress=progress)
    with open_target(path, {}, 0) as target:
        write_ours(contents, target, lambda done, total: None)
        target.publish()
    return path


def state_of(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of ours, verified."""
    found = verify(path)
    return found.read(list(found.table))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare two states bit for bit."""
    assert set(found) == set(expected)
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not wrong


@torch.no_grad()
def logits_of(path: Path, tokens: Tensor) -> Tensor:
    """Return the logits of a GPT in a checkpoint of ours."""
    found: Tensor = load_model(verify(path))(tokens)  # type: ignore[operator]
    return found
