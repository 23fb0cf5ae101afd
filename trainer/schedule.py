"""The learning rate of every step. Arithmetic alone."""

from __future__ import annotations

import math

from trainer.amounts import in_samples
from trainer.batch_sizes import BatchSizes
from trainer.config_parts import OptimizerConfig

ONE = BatchSizes(1)


def bounds(
    config: OptimizerConfig, steps: int, batches: BatchSizes = ONE, sequence: int = 1
) -> tuple[float, float]:
    """Samples of the warm-up, and of the whole schedule; a sample has `sequence` tokens."""
    whole = float(batches.consumed(steps))
    length = in_samples(config.decay, batches, sequence, whole) if config.decay else whole
    if config.warmup:
        return in_samples(config.warmup, batches, sequence, length), length
    return float(batches.consumed(config.warmup_steps)), length


def learning_rate(
    config: OptimizerConfig, step: int, steps: int, batches: BatchSizes = ONE, sequence: int = 1
) -> float:
    """The rate of step 1, 2, ..., steps: a linear rise over the warm-up, then down to min_lr, where it stays.

    It follows the samples consumed, as Megatron's: while batches are small it moves as much slower.
    """
    warmup, length = bounds(config, steps, batches, sequence)
    done = batches.consumed(step)
    if done <= warmup:
        return config.lr * (done / warmup)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        falls = max(1.0, config.wsd_decay * length)
        left = min(1.0, max(0.0, (length - done) / falls))
    else:
        share = min(1.0, (done - warmup) / max(1, length - warmup))
        left = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_lr + (config.lr - config.min_lr) * left
