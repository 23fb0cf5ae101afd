"""The settings of AdamW as torch's optimizers save them."""

from __future__ import annotations

from trainer.config.train_config import TrainConfig


def group_of(config: TrainConfig) -> dict[str, object]:
    """Return a parameter group of torch's AdamW, given the config of our training."""
    optimizer = config.optimizer
    return {
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
