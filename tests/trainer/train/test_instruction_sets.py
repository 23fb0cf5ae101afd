"""Trainings on processors with other instruction sets have nearly the same losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from native.compiled import library
from tests.trainer.conftest import MODEL

Read = Callable[..., list[dict[str, Any]]]
TrainHere = Callable[..., Any]
# The bounds that docs/reference/native-ops.md gives, relative to the loss, over 20 steps.
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"hidden": 64, "sequence": 64},
    "llama": {"hidden": 64, "sequence": 64, "rotary": True, "norm": "rms", "bias": "none", "swiglu": True},
}


@pytest.fixture
def use_level() -> Iterator[Callable[[int], None]]:
    """Return a function that lowers the instruction set of the ops in this process."""
    if library.why_not():
        pytest.skip(library.why_not())
    loaded = library.load()
    own = loaded.level

    def use(level: int) -> None:
        object.__setattr__(loaded, "level", level)
        library.attention_level.cache_clear()

    yield use
    use(own)


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_losses_of_lower_instruction_sets_are_within_the_documented_bound(
    model: str,
    precision: str,
    use_level: Callable[[int], None],
    train_here: TrainHere,
    metrics: Read,
    tmp_path: Path,
) -> None:
    shape = {**MODEL, **MODELS[model]}
    losses = []
    for level in range(library.load().level + 1):
        use_level(level)
        folder = tmp_path / library.LEVELS[level]
        train_here(folder, steps=20, precision=precision, model=shape)
        losses.append([line["loss"] for line in metrics(folder, "step")])
    # Equal losses would mean that the levels were not used.
    assert len(losses) == 1 or losses[0] != losses[-1]
    for own in losses:
        assert own == pytest.approx(losses[-1], rel=BOUNDS[precision])
