"""Bytes that a rank holds of weights, gradients and the optimizer: by engine, ZeRO level, precision, as they do it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.layout import Layout, accumulation
from trainer.plan_activations import WIDE

if TYPE_CHECKING:
    from trainer.config import TrainConfig

MOMENTS = 2 * WIDE  # bytes a number: AdamW's two, in fp32 in every precision


@dataclass(frozen=True)
class Sizes:
    """Numbers of one rank's part of the model."""

    all: int
    layers: int
    layer: int
    table: int
    """The token table, the largest parameter; 0 where this stage has none."""
    ends: int
    """All tables."""


@dataclass(frozen=True)
class Held:
    """Bytes."""

    weights: int
    optimizer: int
    """Moments, and masters of weights that are kept in less than fp32."""
    gradients: int
    """The place where they are added up, which is always there."""
    coming: int = 0
    """All of them, where they need no such place: there from the backward pass to the update."""
    gathered: int = 0
    """Weights of other ranks that a pass has at a time, beside its own."""
    update: int = 0
    """What the update takes for a while."""
    node: int = 0
    """Of the node's memory, where the optimizer is there."""


def held(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    """What stays, and what comes and goes with each step."""
    if config.engine == "deepspeed":
        there = _deepspeed(config, layout, sizes)
    elif config.zero >= 2 and layout.data > 1:
        there = _sharded(config, layout, sizes)
    else:
        there = _buffered(config, layout, sizes)
    if moves_optimizer(config):
        has_masters = config.engine == "deepspeed" or (kept_width(config) < WIDE and config.zero < 2)
        node = there.optimizer if has_masters else there.optimizer * (MOMENTS + WIDE) // MOMENTS
        return replace(there, optimizer=0, update=0, node=node)
    return there


def moves_optimizer(config: TrainConfig) -> bool:
    """Whether its state leaves the device; a CPU's memory is the node's already."""
    return config.offload and (config.hardware.kind or "cpu") != "cpu"


def kept_width(config: TrainConfig) -> int:
    """Bytes of a number of the weights that the passes see, and so of the residual stream."""
    return WIDE if config.precision == "fp32" or config.engine == "deepspeed" else 2


def micros_of(config: TrainConfig, layout: Layout) -> int:
    """Micro-batches of a step."""
    return accumulation(config.global_batch or 1, config.micro_batch, layout.data)


def _buffered(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    """trainer.holding.Buffered."""
    width, divided = kept_width(config), config.zero >= 1 and layout.data > 1
    own = max(sizes.all // layout.data, sizes.table) if divided else sizes.all  # whole parameters have an owner
    state = MOMENTS + (WIDE if width < WIDE else 0)
    sent = width * own if divided else 0
    if micros_of(config, layout) > 1 or layout.data > 1 or (config.parallel.sequence and layout.tensor > 1):
        return Held(width * sizes.all, state * own, WIDE * sizes.all, update=sent)
    fused = (config.hardware.kind or "cpu") == "cpu"  # whose AdamW takes gradients in bf16
    widened = WIDE * own if width < WIDE and not fused else 0
    return Held(width * sizes.all, state * own, 0, coming=width * sizes.all, update=sent + widened)


def _sharded(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    """trainer.sharded.Sharded."""
    width, own = kept_width(config), WIDE * sizes.all // layout.data
    one = width * sizes.layer
    # Of ZeRO 3 a layer in use, the next, and the piece in which that came; the tables stay.
    gathered = width * sizes.all + one if config.zero == 2 else width * sizes.ends + 3 * one
    if (config.hardware.kind or "cpu") == "cpu":  # gloo's own copies of what is gathered and divided
        gathered += one + WIDE * sizes.layer
    added = own if micros_of(config, layout) > 1 else 0
    return Held(own, MOMENTS * sizes.all // layout.data, added, coming=own - added, gathered=gathered)


def _deepspeed(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    whole, own = WIDE * sizes.all, WIDE * sizes.all // layout.data
    if not config.zero:
        return Held(whole, 2 * whole, whole)
    masters = 3 * own  # and the two moments
    bucket = WIDE * min(DEEPSPEED_BUCKET, sizes.all)
    if config.zero == 1:
        return Held(whole, masters, whole, update=own)
    if config.zero == 2:
        return Held(whole, masters, own + 2 * bucket, update=own)
    gathered = WIDE * sizes.ends + 2 * WIDE * sizes.layer
    return Held(own, masters, own + bucket, gathered=gathered, update=own)


DEEPSPEED_BUCKET = 1 << 25  # numbers, as deepspeed_setup has it
