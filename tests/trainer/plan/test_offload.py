"""The plan counts what offload to NVMe takes on the disk of each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.plan.summary import check

MOMENTS, WEIGHTS = 16, 4
"""Bytes per number: masters, two moments and gradients; weights."""


@pytest.mark.parametrize(
    ("zero", "bytes_each"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, 0),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, MOMENTS),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, WEIGHTS),
        (
            {part: {"device": "nvme", "nvme_path": "/n"} for part in ("offload_optimizer", "offload_param")},
            MOMENTS + WEIGHTS,
        ),
    ],
)
def test_each_node_has_the_rows_of_its_ranks(
    zero: dict[str, Any], bytes_each: int, raw_config: Callable[..., dict[str, Any]]
) -> None:
    engine = {"deepspeed": {"zero_optimization": {"stage": 3, **zero}}}
    hardware = {"kind": "cuda", "devices_per_node": 8}
    train = raw_config(model="gpt2-1.3B", global_batch=16, micro_batch=1, engine=engine, hardware=hardware)
    for world, nodes in ((8, 1), (16, 2)):
        summary = check({"train": train, "world_size": world})["summary"]
        expected = bytes_each * summary["parameters"] / nodes
        # Padded rows of the token table.
        assert expected <= summary["offload_disk_bytes"] <= 1.01 * expected


def test_adapters_alone_have_state(raw_config: Callable[..., dict[str, Any]]) -> None:
    moments = {"device": "nvme", "nvme_path": "/nvme"}
    engine = {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": moments}}}
    tune = {"task": "chat", "train": "/chat.jsonl", "lora": {"rank": 8}}
    train = raw_config(model="gpt2-1.3B", engine=engine, tune=tune, init={"source": "/base"})
    train["data"] = {"tokenizer": "/tokenizer.json"}
    answer = check({"train": train, "world_size": 2})
    assert not answer["faults"]
    summary = answer["summary"]
    assert summary["trained_parameters"] < summary["parameters"] / 100
    assert summary["offload_disk_bytes"] == MOMENTS * summary["trained_parameters"]
