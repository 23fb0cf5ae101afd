"""The settings of AdamW as torch's optimizers save them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.train_config import TrainConfig
from trainer.json_types import JsonObject


def group_of(config: Mapping[str, Any]) -> JsonObject:
    """Return a parameter group of torch's AdamW from the config of a training of ours; its defaults without one."""
    given = {**TrainConfig().as_json()["optimizer"], **(config.get("optimizer") or {})}
    return {
        "lr": given["lr"],
        "betas": tuple(given["betas"]),
        "eps": given["eps"],
        "weight_decay": given["weight_decay"],
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
