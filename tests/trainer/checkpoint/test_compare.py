"""The numbers of two checkpoints, compared over files with the same boxes and with others."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from clusterctl.wire.results import Difference
from clusterctl.wire.typed_json import decode, encode, parse
from tests.support import checkpoints as made
from trainer.checkpoint.compare import compare
from trainer.errors import CheckpointError


def pairs(first: int, second: int) -> list[list[str]]:
    """Return every pair of files of so many ranks."""
    return [
        [f"part-{a:05d}.safetensors", f"part-{b:05d}.safetensors"]
        for a in range(first)
        for b in range(second)
    ]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (3, 2), (1, 4)])
def test_each_tensor_is_compared_whole_whatever_the_layouts(tmp_path: Path, ranks: tuple[int, int]) -> None:
    first = made.saved(tmp_path / "a", 1, ranks=ranks[0]).path
    second = made.saved(tmp_path / "b", 2, ranks=ranks[1]).path
    found = compare(first, second, pairs(*ranks))
    state, other = made.state_at(1), made.state_at(2)
    assert found.keys() == state.keys()
    for key, difference in found.items():
        gap = (state[key] - other[key]).abs()
        assert difference.numbers == state[key].numel()
        assert difference.different == int((gap > 0).sum())
        assert difference.largest == pytest.approx(float(gap.max()), rel=1e-6)
        assert difference.squares == pytest.approx(float(gap.double().square().sum()), rel=1e-5)
        assert difference.squares_of_first == pytest.approx(
            float(state[key].double().square().sum()), rel=1e-5
        )
    equal = compare(first, first, pairs(ranks[0], ranks[0]))
    assert not any(difference.different for difference in equal.values())


def test_large_tensors_are_compared_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.checkpoint import compare as module

    monkeypatch.setattr(module, "BLOCK", 64)
    first, second = made.saved(tmp_path / "a", 1, ranks=2).path, made.saved(tmp_path / "b", 1, ranks=3).path
    found = compare(first, second, pairs(2, 3))
    assert all(entry.different == 0 and entry.numbers for entry in found.values())
    assert found["a.weight"].numbers == 72


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_in_one_alone_differs_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    plain = made.state_at

    def broken(step: int, rows: int = 12) -> dict[str, torch.Tensor]:
        state = plain(1, rows)
        if step == 2:
            state["a.weight"][3, 3] = value
        return state

    monkeypatch.setattr(made, "state_at", broken)
    first, second = made.saved(tmp_path / "a", 1).path, made.saved(tmp_path / "b", 2).path
    for one, other in ((first, second), (second, first)):
        difference = compare(one, other, pairs(1, 1))["a.weight"]
        # The launcher reads the trainer's answer as JSON.
        read = decode(Difference, parse(json.dumps(encode(difference)).encode()))
        assert (read.different, read.gap, read.relative) == (1, math.inf, math.inf)
        assert read.as_json()["largest"] is None
    same = compare(second, second, pairs(1, 1))["a.weight"]
    assert same.different == 0 and math.isfinite(same.squares_of_first)


def test_damage_is_found_while_comparing(tmp_path: Path) -> None:
    first = made.saved(tmp_path / "a", 1).path
    path = first / "part-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        compare(first, first, pairs(1, 1))
