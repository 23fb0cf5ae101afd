"""The kinds of a model's layers, counted without a look at each layer."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from trainer.config.model import ModelConfig

CYCLES = [
    {},
    {"rotated": (0, 1)},
    {"window": 4, "windowed": (1, 1, 0)},
    {"window": 4, "windowed": (1, 0), "rotated": (1, 0, 1)},
]


@pytest.mark.parametrize(("cycles", "dense"), list(product(CYCLES, [0, 1, 4, 7])))
def test_the_kinds_are_those_of_each_layer(cycles: dict[str, Any], dense: int) -> None:
    experts = {"experts": 4, "dense_layers": dense, "dense_ffn": 64} if dense else {}
    model = ModelConfig(layers=7, hidden=32, heads=2, rotary=True, **cycles, **experts)
    found = Counter[ModelConfig]()
    for kind, count in model.kinds_of_layers():
        found[kind] += count
    assert found == Counter(model.each_layer)
