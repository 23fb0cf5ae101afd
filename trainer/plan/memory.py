"""Memory of every stage of a layout at its highest: what is kept between steps, and the worst moment of a step.

Bytes that a rank holds of weights, gradients and the optimizer: by engine, ZeRO level, precision, as they do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.config.chips import Chip
from trainer.config.layout import (
    Layout,
    accumulation,
    piece_layers,
    stage_pieces,
)
from trainer.plan import activations as kept
from trainer.plan.activations import WIDE, AttentionCore, Pass
from trainer.plan.hardware import chip_of

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


# Bytes that a CPU's libraries take when they begin to compute: code, packed matrices.
LIBRARIES = 90_000_000
# And what fully_shard loads.
SHARDING = 76_000_000
# Bytes of logits at a time, as native.cpu.linear_cross_entropy has it.
PIECE = 256 << 20
# Results that a stage may have sent before one of them is taken, as pipeline_passes has it.
UNTAKEN = 2


@dataclass(frozen=True)
class Memory:
    """Bytes a device at the worst moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass, of all micro-batches that are under way."""
    logits: int
    """The vocabulary's scores, and what the loss makes of them."""
    buffers: int
    """Copies of weights in the matrices' type, one layer's working set, and what is being exchanged."""

    @property
    def total(self) -> int:
        return sum(self.__dict__.values())

    def as_json(self) -> dict[str, int]:
        return {**self.__dict__, "total": self.total}


@dataclass(frozen=True)
class Stage:
    """What the ranks of one pipeline stage hold."""

    stage: int
    layers: tuple[tuple[int, int], ...]
    """Half-open ranges of the model's layers."""
    parameters: int
    """Numbers that one rank of it trains (its tensor parallel part, padding included)."""
    memory: Memory
    """At its highest."""
    moment: str
    """When that is."""
    activations: int
    """The most of them at any moment: the highest one may be another, when none are left."""
    node: int = 0
    """Bytes of the node's memory that one device's optimizer takes."""


@dataclass(frozen=True)
class Moment:
    """One of those that may be the highest of a step, by what is there beside what always is."""

    name: str
    coming: int
    """Of gradients that need no place of their own, those that are there."""
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return self.coming + self.activations + self.logits + self.buffers


def stages(config: TrainConfig, layout: Layout, ends: bool = False) -> list[Stage]:
    """Every stage of a layout; with `ends` the first and the last, one of which needs most."""
    some = sorted({0, layout.pipeline - 1}) if ends else range(layout.pipeline)
    return [_stage(config, layout, at) for at in some]


def layer_ranges(config: TrainConfig, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """The layers of a stage, a range a piece."""
    parallel = config.parallel
    return _ranges(config.model.layers, layout.pipeline, parallel.interleave, tuple(parallel.layers), stage)


@lru_cache(4096)
def _ranges(
    layers: int, stages: int, interleave: int, given: tuple[int, ...], stage: int
) -> tuple[tuple[int, int], ...]:
    sizes = piece_layers(layers, stages * interleave, given)
    return tuple(
        (sum(sizes[:piece]), sum(sizes[: piece + 1])) for piece in stage_pieces(stage, stages, interleave)
    )


def parameters_of(config: TrainConfig, layout: Layout, stage: int) -> int:
    """Numbers that one rank of a stage trains; the last stage has its own copy of a tied token table."""
    return sizes_of(config, layout, stage).all


def sizes_of(config: TrainConfig, layout: Layout, stage: int) -> Sizes:
    """The same in its parts."""
    model, tensor = config.model, layout.tensor
    matrices = model.hidden * (model.qkv_width + model.hidden + model.up_width + model.inner)
    cut = matrices + model.qkv_width + model.up_width
    layer = cut // tensor + model.layer_parameters() - cut
    layers = sum(end - start for start, end in layer_ranges(config, layout, stage))
    first, last = stage == 0, stage == layout.pipeline - 1
    table = model.padded(tensor) // tensor * model.hidden if first or last else 0
    positions = model.position_tables * model.position_rows * model.hidden if first else 0
    norm = 2 * model.hidden if last else 0
    return Sizes(layers * layer + table + positions + norm, layers, layer, table, table + positions)


def under_way(config: TrainConfig, layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at once, in units of all its layers (1F1B)."""
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.data)
    stages_, pieces = layout.pipeline, config.parallel.interleave
    if stages_ == 1:
        return 1.0
    if pieces == 1:
        return float(min(micros, stages_ - stage))
    warm = 2 * (stages_ - stage - 1) + (pieces - 1) * stages_ + 1
    return min(micros * pieces, warm) / pieces


def _stage(config: TrainConfig, layout: Layout, stage: int) -> Stage:
    sizes, one = sizes_of(config, layout, stage), pass_of(config, layout)
    there = held(config, layout, sizes)
    first, last = stage == 0, stage == layout.pipeline - 1
    ends = (kept.embedding(one) if first else 0) + (kept.head(one) if last else 0)
    through = int(_activations(config, one, sizes.layers) * under_way(config, layout, stage)) + ends
    moments = _moments(config, one, sizes, there, last, through)
    highest = max(moments, key=lambda moment: moment.total)
    more = SHARDING if config.zero >= 2 and config.engine == "torch" and layout.data > 1 else 0
    always = (LIBRARIES + more if one.kind == "cpu" else 0) + (_messages(one) if layout.pipeline > 1 else 0)
    memory = Memory(
        there.weights,
        there.gradients + highest.coming,
        there.optimizer,
        highest.activations,
        highest.logits,
        highest.buffers + always,
    )
    return Stage(
        stage, layer_ranges(config, layout, stage), sizes.all, memory, highest.name, through, there.node
    )


def pass_of(config: TrainConfig, layout: Layout) -> Pass:
    """One micro-batch on one rank."""
    width = WIDE if config.precision == "fp32" else 2
    kind, parallel = config.hardware.kind or "cpu", config.parallel
    cast = kept_width(config) > width
    core = attention_core(chip_of(config), config.precision)
    return Pass(config.model, config.micro_batch, width, kind, core, layout.tensor, parallel.sequence, cast)


def attention_core(chip: Chip, precision: str) -> AttentionCore:
    """Return what computes attention on a chip."""
    if precision in chip.kernels:
        return AttentionCore.KERNEL
    return AttentionCore.BLOCKS if chip.kind == "cpu" else AttentionCore.PRODUCTS


def _messages(one: Pass) -> int:
    """Between stages: two results that the next has not taken, and what comes, forward and backward."""
    return 2 * (UNTAKEN + 1) * one.residual


def _activations(config: TrainConfig, one: Pass, layers: int) -> int:
    """Of one micro-batch through so many layers, without copies of weights."""
    recompute = config.recompute
    if recompute.mode == "full":
        inputs = -(-layers // recompute.every)
        return inputs * one.residual // (one.tensor if recompute.split and not one.sequence else 1)
    return layers * kept.layer(one, recompute.mode == "selective")


def _moments(
    config: TrainConfig, one: Pass, sizes: Sizes, there: Held, last: bool, through: int
) -> Iterator[Moment]:
    """Each moment that may be the highest; `through`: all activations that are kept."""
    casts, width = sizes.layers * kept.cast_layer(one), kept_width(config)
    # Bytes of a number of a gradient on its way into the place for all.
    added = width if there.gradients else 0
    table = width * sizes.table
    # Makes the head's gradients with the loss.
    fused = one.kind == "cpu" and one.tensor == 1
    if last:
        everything = casts + kept.cast_table(one) + there.gathered
        if fused:
            logits, gradients = _at_once(one, sizes)
            yield Moment("loss", 0, through, logits, everything + gradients)
        else:
            scores = one.tokens * one.model.padded(one.tensor) // one.tensor
            wide = 0 if one.width == WIDE and one.tensor > 1 else WIDE if one.tensor > 1 else 2 * WIDE
            yield Moment("loss", 0, through, scores * (one.width + wide), everything)
            gradient = sizes.table * (max(width, added) + (one.width if one.cast else 0))
            yield Moment(
                "head", 0, through, scores * (one.width + wide // 2), everything + gradient + one.wide_share
            )
    if config.recompute.mode == "full":
        # Made anew with each block.
        casts = 0
    working = casts + _again(config, one, sizes.layers) + _working(one) + there.gathered
    # For the embedding's part, at the end.
    waiting = table if last and there.gradients else 0
    begun = there.coming * (sizes.layer + sizes.table * last) // sizes.all
    yield Moment("layer", begun, through, 0, working + waiting)
    yield Moment("layer", there.coming, through // max(1, sizes.layers), 0, working + waiting)
    yield Moment("embedding", there.coming, 0, 0, casts + waiting + table + there.gathered)
    yield Moment("update", there.coming, 0, 0, there.update)


def _at_once(one: Pass, sizes: Sizes) -> tuple[int, int]:
    """A CPU's loss, with both gradients made some tokens at a time (native.cpu.linear_cross_entropy): logits, and the
    gradients of the table and of what came in."""
    rows = max(1, min(one.tokens, PIECE // (one.width * one.model.padded_vocab)))
    several = one.width < WIDE and rows < one.tokens
    gradients = sizes.table * (one.width + (WIDE + one.width if several else 0))
    return rows * one.width * one.model.padded_vocab, gradients + one.width * one.tokens * one.model.hidden


def _again(config: TrainConfig, one: Pass, layers: int) -> int:
    """What recomputation makes anew at a time."""
    if config.recompute.mode == "full":
        return min(config.recompute.every, layers) * (kept.layer(one) + kept.cast_layer(one))
    if config.recompute.mode == "selective":
        return kept.attention(one) - kept.attention(one, selective=True)
    return 0


def _working(one: Pass) -> int:
    """Gradients of activations on their way through a layer: the widest place is the feed-forward part."""
    inner = one.width * one.tokens * one.model.up_width // one.tensor
    matrix = one.model.hidden * max(one.model.up_width, one.model.qkv_width) // one.tensor
    gathered = one.width * one.tokens * one.model.hidden if one.sequence else 0
    return 2 * inner + gathered + one.residual + matrix * (WIDE + one.width if one.cast else one.width)


# Bytes a number: AdamW's two, in fp32 in every precision.
MOMENTS = 2 * WIDE


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
    """trainer.engine.rank_state.Buffered."""
    width, divided = kept_width(config), config.zero >= 1 and layout.data > 1
    # Whole parameters have an owner.
    own = max(sizes.all // layout.data, sizes.table) if divided else sizes.all
    state = MOMENTS + (WIDE if width < WIDE else 0)
    sent = width * own if divided else 0
    if micros_of(config, layout) > 1 or layout.data > 1 or (config.parallel.sequence and layout.tensor > 1):
        return Held(width * sizes.all, state * own, WIDE * sizes.all, update=sent)
    # Whose AdamW takes gradients in bf16.
    fused = (config.hardware.kind or "cpu") == "cpu"
    widened = WIDE * own if width < WIDE and not fused else 0
    return Held(width * sizes.all, state * own, 0, coming=width * sizes.all, update=sent + widened)


def _sharded(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    """trainer.engine.sharded.Sharded."""
    width, own = kept_width(config), WIDE * sizes.all // layout.data
    one = width * sizes.layer
    # Of ZeRO 3 a layer in use, the next, and the piece in which that came; the tables stay.
    gathered = width * sizes.all + one if config.zero == 2 else width * sizes.ends + 3 * one
    # Gloo's own copies of what is gathered and divided.
    if (config.hardware.kind or "cpu") == "cpu":
        gathered += one + WIDE * sizes.layer
    added = own if micros_of(config, layout) > 1 else 0
    return Held(own, MOMENTS * sizes.all // layout.data, added, coming=own - added, gathered=gathered)


def _deepspeed(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    whole, own = WIDE * sizes.all, WIDE * sizes.all // layout.data
    if not config.zero:
        return Held(whole, 2 * whole, whole)
    # And the two moments.
    masters = 3 * own
    bucket = WIDE * min(DEEPSPEED_BUCKET, sizes.all)
    if config.zero == 1:
        return Held(whole, masters, whole, update=own)
    if config.zero == 2:
        return Held(whole, masters, own + 2 * bucket, update=own)
    gathered = WIDE * sizes.ends + 2 * WIDE * sizes.layer
    return Held(own, masters, own + bucket, gathered=gathered, update=own)


# Numbers, as deepspeed_setup has it.
DEEPSPEED_BUCKET = 1 << 25
