"""The learning rate of every step. Arithmetic alone."""

from __future__ import annotations

import math

from trainer.amounts import in_samples
from trainer.config_parts import OptimizerConfig


def bounds(config: OptimizerConfig, steps: int, batch: int = 1, sequence: int = 1) -> tuple[float, float]:
    """Steps of the warm-up, and of the whole schedule; `batch` samples of `sequence` tokens are a step."""
    whole = float(steps * batch)
    length = in_samples(config.decay, batch, sequence, whole) if config.decay else whole
    warmup = (
        in_samples(config.warmup, batch, sequence, length) / batch if config.warmup else config.warmup_steps
    )
    return warmup, length / batch


def learning_rate(config: OptimizerConfig, step: int, steps: int, batch: int = 1, sequence: int = 1) -> float:
    """The rate of step 1, 2, ..., steps: a linear rise over the warm-up, then down to min_lr, where it stays."""
    warmup, length = bounds(config, steps, batch, sequence)
    if step <= warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        falls = max(1.0, config.wsd_decay * length)
        left = min(1.0, max(0.0, (length - step) / falls))
    else:
        share = min(1.0, (step - warmup) / max(1, length - warmup))
        left = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_lr + (config.lr - config.min_lr) * left
