"""`engine: {deepspeed: SETTINGS}`: merged with the job, contradictions named, nothing silently dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.config.deepspeed import REFUSED, settings_of
from trainer.config.train_config import TrainConfig
from trainer.errors import Fault
from trainer.plan.resolve import read_config, try_config

Make = Callable[..., dict[str, Any]]
KEY = "train.engine.deepspeed."


@pytest.fixture
def merged(raw_config: Make) -> Callable[..., tuple[TrainConfig, list[Fault]]]:
    def merge(settings: Any, world: int = 1, **changes: Any) -> tuple[TrainConfig, list[Fault]]:
        raw = raw_config(engine={"deepspeed": settings}, **changes)
        raw = {key: value for key, value in raw.items() if value is not None}
        return try_config(raw, world)

    return merge


Merge = Callable[..., tuple[TrainConfig, list[Fault]]]


def test_settings_that_the_job_leaves_out_become_its_own(merged: Merge) -> None:
    settings = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
        "prescale_gradients": True,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 11, "loss_scale_window": 500},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": "auto"}},
        "scheduler": {"enabled": False},
        "wall_clock_breakdown": False,
    }
    config, faults = merged(settings, 2, micro_batch=None, global_batch=None, optimizer=None)
    assert not faults
    assert (config.global_batch, config.micro_batch, config.zero, config.offload) == (16, 4, 2, True)
    assert (config.precision, config.loss_scale.initial, config.loss_scale.window) == ("fp16", 2048.0, 500)
    optimizer = config.optimizer
    assert (optimizer.clip, optimizer.lr, optimizer.betas, optimizer.eps) == (0.5, 0.01, (0.8, 0.9), 1e-8)
    passed = settings_of(config.deepspeed)
    assert passed["zero_optimization"]["overlap_comm"] and "train_batch_size" not in passed
    assert config.engine == "deepspeed" and read_config(config.as_json(), 2) == config


def test_every_contradiction_is_named_at_once(merged: Merge) -> None:
    settings = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}},
        "bf16": {"enabled": False},
        "optimizer": {"type": "Lion", "params": {"lr": 5}},
        "scheduler": {"type": "WarmupLR"},
        "zero_optimisation": {},
    }
    _, faults = merged(settings, zero=1, precision="bf16")
    found = {fault.key.removeprefix(KEY): f"{fault.what}; {fault.remedy}" for fault in faults}
    for key, says in {
        "train_batch_size": "is 16, and the job's global_batch is 8",
        "zero_optimization.stage": "goes with ZeRO 3, and the stage is 1",
        "zero_optimization.offload_param.nvme_path": "is None, and device: nvme needs a folder",
        "bf16.enabled": "is false, and the job's precision is bf16",
        "optimizer.type": "AdamW is the only",
        "optimizer.params.lr": "is 5, and the job's optimizer.lr is 0.01",
        "scheduler": "optimizer: {schedule",
        "zero_optimisation": "did you mean 'zero_optimization'?",
    }.items():
        assert says in found[key], (key, found)
    _, faults = merged({"gradient_accumulation_steps": 3})
    assert faults[0].key == f"{KEY}gradient_accumulation_steps" and "is 4" in faults[0].what


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("ds.json", "no {deepspeed: SETTINGS}"),
        ([1], "no {deepspeed: SETTINGS}"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "so is fp16"),
        ({"fp16": {"enabled": True, "initial_scale_power": "x"}}, "a number is needed"),
        ({"zero_optimization": {"stage": 7}}, "one of 0, 1, 2, 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "moon"}}}, "device: cpu"),
        *(({key: {"enabled": True}}, "is not supported here") for key in REFUSED),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(settings: Any, says: str, merged: Merge) -> None:
    _, faults = merged(settings)
    assert any(says in str(fault) for fault in faults), faults


@pytest.mark.parametrize(
    ("zero", "refused"),
    [
        ({"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, "offload_param"),
        ({"offload_param": {"device": "cpu"}}, ""),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, ""),
    ],
)
def test_weights_on_a_disk_are_refused_with_adapters(zero: Any, refused: str, merged: Merge) -> None:
    tune = {"task": "chat", "train": "/chat.jsonl", "lora": {"rank": 4}}
    others = {"tune": tune, "init": {"source": "/base"}, "data": {"tokenizer": "/tokenizer.json"}}
    _, faults = merged({"zero_optimization": {"stage": 3, **zero}}, 2, **others)
    if not refused:
        assert not faults
        return
    (fault,) = faults
    assert fault.key == f"{KEY}zero_optimization.{refused}.device" and fault.remedy == "device: cpu"
    assert "the weights that LoRA leaves as they are cannot be read there" in fault.what
    _, faults = merged({"zero_optimization": {"stage": 3, **zero}}, 2)
    assert not faults, "without adapters"
