"""What a plan says of checkpoints, next to checkpoints that were saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.plan.checkpoints import checkpoint_cost
from trainer.plan.hardware import hardware_of
from trainer.plan.resolve import read_config


@pytest.mark.parametrize("state", ["all", "weights"])
def test_the_planned_bytes_are_those_of_the_files(
    state: str, tmp_path: Path, raw_config: Callable[..., dict[str, Any]], train_here: Callable[..., Any]
) -> None:
    save = {"every": 4, "keep": 1, "state": state}
    train_here(tmp_path, save=save)
    config = read_config(raw_config(save=save), 1)
    cost = checkpoint_cost(config, config.layout(1), hardware_of(config, 1))
    (path,) = (tmp_path / "checkpoints").glob("step-*")
    data = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    # Headers are a large part of a model this small.
    assert cost.bytes == (12 if state == "all" else 4) * config.model.parameters()
    assert cost.bytes < data < cost.bytes + 20_000
    assert cost.kept == 2 and cost.staging_bytes == 0


def test_large_states_are_copied_and_the_ranks_of_a_node_share_the_work(
    raw_config: Callable[..., dict[str, Any]],
) -> None:
    whole = None
    for zero in (1, 3):
        hardware = {"kind": "cuda", "devices_per_node": 8}
        raw = raw_config(
            model="gpt2-13B",
            global_batch=64,
            zero=zero,
            hardware=hardware,
            save={"keep": {"last": 3, "every": 2}},
        )
        config = read_config(raw, 32)
        cost = checkpoint_cost(config, config.layout(32), hardware_of(config, 32))
        whole = whole or cost.bytes
        assert cost.bytes == whole == 12 * config.model.parameters()
        assert whole / 4 <= cost.node_bytes < whole / 3 and cost.staging_bytes == cost.node_bytes
        assert cost.stall_seconds < cost.seconds
