"""Compare a plan's checkpoint sizes with saved checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.plan.checkpoints import checkpoint_cost
from trainer.plan.hardware import hardware_of
from trainer.plan.resolve import read_config
from trainer.plan.summary import check


@pytest.mark.slow
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


def test_the_share_of_time_without_training_follows_from_the_step(
    raw_config: Callable[..., dict[str, Any]],
) -> None:
    config = read_config(raw_config(save={"every": 10, "background": "never"}), 1)
    cost = checkpoint_cost(config, config.layout(1), hardware_of(config, 1), step_seconds=2.0)
    assert cost.stall_share == pytest.approx(cost.stall_seconds / (20.0 + cost.stall_seconds))
    assert checkpoint_cost(config, config.layout(1), hardware_of(config, 1)).stall_share == 0


def test_checkpoints_that_do_not_fit_the_disk_are_refused(raw_config: Callable[..., dict[str, Any]]) -> None:
    def faults(world: int = 2, **save: Any) -> list[str]:
        disk = {"disk": "400GB", "devices_per_node": 1, "kind": "cpu"}
        train = raw_config(
            model="gpt2-13B", global_batch=64, hardware=disk, save={"every": 5, **save}, zero=3, steps=100
        )
        answer = check({"train": train, "world_size": world})
        return [fault["what"] for fault in answer["faults"]]

    # 13B parameters take 154 GB, of which each of two nodes has a half.
    assert not faults(keep=2)
    (fault,) = faults(keep=9)
    assert "on each node, which has 400 GB" in fault
    (fault,) = faults(keep=2, copies=2)
    assert "3 checkpoints of" in fault
    (fault,) = faults(keep=2, dir="/shared")
    assert "on the shared disk" in fault


def test_a_shared_folder_must_be_absolute_and_needs_no_copies(
    raw_config: Callable[..., dict[str, Any]],
) -> None:
    answer = check({"train": raw_config(save={"dir": "here", "copies": 2}), "world_size": 2})
    assert [fault["key"] for fault in answer["faults"]] == ["train.save.dir", "train.save.copies"]
