"""Compute the peak memory of each stage of a layout: the memory between steps, and the largest moment of a step.

The bytes of weights, gradients and optimizer state depend on the engine, ZeRO level and precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from native.vocabulary import tokens_at_a_time
from trainer.config.attention import WIDE, AttentionCore
from trainer.config.chips import Chip
from trainer.config.layout import (
    Layout,
    accumulation,
    piece_layers,
    stage_pieces,
)
from trainer.config.lora import adapter_parameters
from trainer.config.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.plan import activations as kept
from trainer.plan.activations import MicroBatch
from trainer.plan.hardware import chip_of

# Bytes that a CPU's libraries use once they compute: code and packed matrices.
LIBRARIES = 66_000_000
# Bytes of the modules that fully_shard, torch's checkpointing, which imports torch's compiler, and its use load in
# addition.
SHARDING, CHECKPOINTING, COMPILING = 100_000_000, 134_000_000, 240_000_000
# How many results a stage may send before one of them is received, as in trainer.engine.pipeline.
UNTAKEN = 2


@dataclass(frozen=True)
class Memory:
    """Bytes per device at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Activations kept for the backward pass, for all micro-batches in flight."""
    logits: int
    """Logits, and the tensors that the loss computes from them."""
    buffers: int
    """16-bit copies of weights, the working set of one layer, and messages."""

    @property
    def total(self) -> int:
        return sum(self.__dict__.values())

    def by_purpose(self) -> dict[str, int]:
        """Return the bytes of each purpose, and their total."""
        return {**self.__dict__, "total": self.total}


@dataclass(frozen=True)
class Stage:
    """The layers and the memory of each rank of a pipeline stage."""

    stage: int
    layers: tuple[tuple[int, int], ...]
    """The model's layers on this stage, as half-open ranges."""
    parameters: int
    """Parameters of one rank: its tensor parallel part, padding included."""
    memory: Memory
    """The memory at the peak."""
    moment: str
    """The name of the moment at the peak."""
    activations: int
    """The largest number of bytes of activations at any moment, not necessarily at the peak."""
    node: int = 0
    """Bytes of CPU memory for one device's offloaded optimizer."""


@dataclass(frozen=True)
class Moment:
    """A moment of a step that may be the peak, with the bytes that exist only then."""

    name: str
    coming: int
    """The gradients at this moment that have no permanent buffer."""
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return self.coming + self.activations + self.logits + self.buffers


def stages(config: TrainConfig, layout: Layout, ends: bool = False) -> list[Stage]:
    """Return all stages of a layout; with `ends` only the first and the last, one of which needs most memory."""
    numbers = sorted({0, layout.pipeline - 1}) if ends else range(layout.pipeline)
    return [_stage(config, layout, at) for at in numbers]


def layer_ranges(config: TrainConfig, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """Return the layers of a stage: one half-open range per piece."""
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


def layers_of(config: TrainConfig, layout: Layout, stage: int) -> list[ModelConfig]:
    """Return the config of each layer of a stage."""
    ranges = layer_ranges(config, layout, stage)
    return [layer for start, end in ranges for layer in config.model.each_layer[start:end]]


def sizes_of(config: TrainConfig, layout: Layout, stage: int) -> Sizes:
    """Return the parameters of a rank, by part; with a tied token table the last stage has its own copy."""
    model, tensor = config.model, layout.tensor
    layers = layers_of(config, layout, stage)
    each = [_layer_size(layer, tensor) for layer in layers]
    first, last = stage == 0, stage == layout.pipeline - 1
    table = model.padded(tensor) // tensor * model.hidden if first or last else 0
    tables = (first + last if not model.tied else first or last) * table
    positions = model.position_tables * model.position_rows * model.hidden if first else 0
    norm = model.norm_width if last else 0
    largest = max(each) if each else _layer_size(model, tensor)
    return Sizes(sum(each) + tables + positions + norm, len(layers), largest, table, tables + positions)


def _layer_size(layer: ModelConfig, tensor: int) -> int:
    """Return a rank's parameters of a layer."""
    cut = layer.divided_parameters()
    return cut // tensor + layer.layer_parameters() - cut


def learned_sizes(config: TrainConfig, layout: Layout, sizes: Sizes) -> Sizes:
    """Return the parameters of one rank that are learned; with adapters, only theirs."""
    lora = config.tune.lora
    if not lora.rank:
        return sizes
    layer = adapter_parameters(config.model, lora, layout.tensor)
    return Sizes(max(1, sizes.layers * layer), sizes.layers, layer, 0, 0)


def learned_parameters(config: TrainConfig) -> int:
    """Return how many parameters of the whole model are learned."""
    lora, model = config.tune.lora, config.model
    return model.layers * adapter_parameters(model, lora) if lora.rank else model.parameters()


def under_way(config: TrainConfig, layout: Layout, stage: int) -> float:
    """Return for how many micro-batches a stage keeps activations (1F1B); one piece of several is a fraction."""
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.readers)
    stages_, pieces = layout.pipeline, config.parallel.interleave
    if stages_ == 1:
        return 1.0
    if pieces == 1:
        return float(min(micros, stages_ - stage))
    warm = 2 * (stages_ - stage - 1) + (pieces - 1) * stages_ + 1
    return min(micros * pieces, warm) / pieces


def _stage(config: TrainConfig, layout: Layout, stage: int) -> Stage:
    sizes, micro = sizes_of(config, layout, stage), micro_batch_of(config, layout)
    state = held(config, layout, sizes)
    first, last = stage == 0, stage == layout.pipeline - 1
    ends = (kept.embedding(micro) if first else 0) + (kept.head(micro) if last else 0)
    own = [
        replace(micro, model=layer) for layer in layers_of(replace(config, model=micro.model), layout, stage)
    ]
    through = int(_activations(config, micro, own) * under_way(config, layout, stage)) + ends
    moments = _moments(config, micro, sizes, state, (first, last), through)
    highest = max(moments, key=lambda moment: moment.total)
    more = SHARDING if config.zero >= 2 and config.engine == "torch" and layout.data > 1 else 0
    more = more if config.recompute.mode == "none" else max(more, CHECKPOINTING)
    more = max(more, COMPILING) if config.compile == "blocks" else more
    always = (LIBRARIES + more if micro.kind == "cpu" else 0) + (
        _messages(micro) if layout.pipeline > 1 else 0
    )
    memory = Memory(
        state.weights,
        state.gradients + highest.coming,
        state.optimizer,
        highest.activations,
        highest.logits,
        highest.buffers + always,
    )
    return Stage(
        stage, layer_ranges(config, layout, stage), sizes.all, memory, highest.name, through, state.node
    )


def micro_batch_of(config: TrainConfig, layout: Layout) -> MicroBatch:
    """Return the description of one micro-batch on one rank."""
    width = WIDE if config.precision == "fp32" else 2
    kind, parallel = config.hardware.kind or "cpu", config.parallel
    cast = kept_width(config) > width
    core = attention_core(chip_of(config), config.precision)
    model = replace(config.model, sequence=config.model.sequence // layout.context)
    own = (layout.tensor, parallel.sequence, cast, layout.context, bool(config.tune.lora.rank))
    again = config.recomputes_norms(kind)
    rows = config.micro_batch * config.tune.rows
    return MicroBatch(model, rows, width, kind, core, *own, again)


def attention_core(chip: Chip, precision: str) -> AttentionCore:
    """Return how attention is computed on a chip."""
    return AttentionCore.KERNEL if precision in chip.kernels else AttentionCore.PRODUCTS


def _messages(micro: MicroBatch) -> int:
    """Return the bytes of messages between stages: two unread results and an arriving one, in both directions."""
    return 2 * (UNTAKEN + 1) * micro.residual


def _activations(config: TrainConfig, micro: MicroBatch, layers: Sequence[MicroBatch]) -> int:
    """Return the bytes of activations of one micro-batch in these layers, without copies of weights."""
    recompute = config.recompute
    if recompute.mode == "full":
        inputs = -(-len(layers) // recompute.every)
        return inputs * micro.residual // (micro.tensor if recompute.split and not micro.sequence else 1)
    return sum(kept.layer(layer, recompute.mode == "selective") for layer in layers)


def _moments(
    config: TrainConfig,
    micro: MicroBatch,
    sizes: Sizes,
    state: Held,
    ends: tuple[bool, bool],
    through: int,
) -> Iterator[Moment]:
    """Yield each moment that may be the peak.

    `ends`: whether the stage is the first and the last; `through`: the bytes of all kept activations.
    """
    first, last = ends
    casts, width = sizes.layers * kept.cast_layer(micro), kept_width(config)
    # A frozen table has no gradient.
    sizes = replace(sizes, table=0) if config.tune.lora.rank else sizes
    # Bytes per number of a gradient before it is added to the buffer.
    added = width if state.gradients else 0
    table = width * sizes.table
    # This loss also computes the gradients of the output matrix. Triton needs the GPUs that have bf16.
    fused = micro.tensor == 1 and (
        micro.kind == "cpu" or (micro.kind == "cuda" and "bf16" in chip_of(config).types)
    )
    if last:
        everything = casts + kept.cast_table(micro) + state.gathered
        if fused:
            logits, gradients = _at_once(config, micro, sizes)
            yield Moment("loss", 0, through, logits, everything + gradients)
        else:
            scores = micro.tokens * micro.model.padded(micro.tensor) // micro.tensor
            in_place = micro.width == WIDE or micro.kind in ("cpu", "cuda")
            wide = (0 if in_place else WIDE) if micro.tensor > 1 else 2 * WIDE
            yield Moment("loss", 0, through, scores * (micro.width + wide), everything)
            gradient = sizes.table * (max(width, added) + (micro.width if micro.cast else 0))
            yield Moment(
                "head",
                0,
                through,
                scores * (micro.width + wide // 2),
                everything + gradient + micro.wide_share,
            )
    if config.recompute.mode == "full":
        # Recomputed with each block.
        casts = 0
    working = casts + _again(config, micro, sizes.layers) + _working(micro) + state.gathered
    # With a tied table, the output matrix's gradient waits for the embedding's, which comes last.
    waiting = table if last and state.gradients and config.model.tied else 0
    begun = state.coming * (sizes.layer + sizes.table * last) // sizes.all
    yield Moment("layer", begun, through, 0, working + waiting)
    yield Moment("layer", state.coming, through // max(1, sizes.layers), 0, working + waiting)
    # A CPU adds the embedding's gradient to that of the output matrix, if both are on this stage.
    second = 0 if micro.kind == "cpu" and config.model.tied and first and last else table
    yield Moment("embedding", state.coming, 0, 0, casts + waiting + second + state.gathered)
    yield Moment("update", state.coming, 0, 0, state.update)
    yield Moment("save", 0, 0, 0, state.joined)


def _at_once(config: TrainConfig, micro: MicroBatch, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes of the loss in linear_cross_entropy: the logits of some tokens; both gradients."""
    columns, hidden = micro.model.padded_vocab, micro.model.hidden
    memory = int((config.hardware.memory or chip_of(config).memory) * 1e9) if micro.kind != "cpu" else 0
    rows = tokens_at_a_time(micro.tokens, columns, hidden, micro.width, memory)
    several = micro.width < WIDE and rows < micro.tokens
    gradients = sizes.table * (WIDE if several else micro.width)
    return (
        rows * micro.width * columns,
        gradients + micro.width * micro.tokens * hidden,
    )


def _again(config: TrainConfig, micro: MicroBatch, layers: int) -> int:
    """Return the bytes of activations that are recomputed at the same time."""
    if config.recompute.mode == "full":
        return min(config.recompute.every, layers) * (kept.layer(micro) + kept.cast_layer(micro))
    if config.recompute.mode == "selective":
        attention, share = config.model.attention, micro.share
        return attention.kept(share) - attention.kept(share, selective=True)
    return 0


def _working(micro: MicroBatch) -> int:
    """Return the bytes of the gradients within a layer at its widest point, the feed-forward part."""
    inner = micro.width * micro.tokens * micro.model.up_width // micro.tensor
    matrix = micro.model.hidden * max(micro.model.up_width, micro.model.attention.outputs) // micro.tensor
    gathered = micro.width * micro.tokens * micro.model.hidden if micro.sequence else 0
    return (
        2 * inner + gathered + micro.residual + matrix * (WIDE + micro.width if micro.cast else micro.width)
    )


# Bytes per parameter of AdamW's two moments, fp32 in every precision.
MOMENTS = 2 * WIDE


@dataclass(frozen=True)
class Sizes:
    """How many parameters one rank has, by part."""

    all: int
    layers: int
    layer: int
    table: int
    """The token table, the largest parameter; 0 on stages without it."""
    ends: int
    """All embedding tables."""


@dataclass(frozen=True)
class Held:
    """Bytes of weights, gradients and optimizer state."""

    weights: int
    optimizer: int
    """The moments, and fp32 copies of 16-bit weights (or the remainders that extend them to fp32)."""
    gradients: int
    """A permanent buffer in which gradients are summed."""
    coming: int = 0
    """Gradients without such a buffer; they exist from the backward pass to the update."""
    gathered: int = 0
    """Weights of other ranks that are in memory at the same time during a pass."""
    update: int = 0
    """Temporary memory of the optimizer update."""
    joined: int = 0
    """Whole fp32 weights instead of remainders: the additional bytes while a checkpoint is saved."""
    node: int = 0
    """CPU memory, with `offload`."""


def held(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    """Return the bytes that a rank holds between and during steps."""
    own = learned_sizes(config, layout, sizes)
    divided = config.zero >= 2 and layout.data > 1
    if config.engine == "deepspeed":
        # In DeepSpeed ZeRO 2 does not divide weights.
        divided = config.zero == 3 and layout.data > 1
        state = _deepspeed(config, layout, own)
    else:
        state = (_sharded if divided else _buffered)(config, layout, own)
    if own is not sizes:
        gathered = _sharded(config, layout, sizes).gathered if divided else 0
        fixed = WIDE * sizes.all // layout.data if divided else kept_width(config) * sizes.all
        state = replace(state, weights=state.weights + fixed, gathered=gathered)
    if moves_optimizer(config):
        has_masters = config.engine == "deepspeed" or (kept_width(config) < WIDE and config.zero < 2)
        node = state.optimizer if has_masters else state.optimizer * (MOMENTS + WIDE) // MOMENTS
        return replace(state, optimizer=0, update=0, node=node)
    return state


def moves_optimizer(config: TrainConfig) -> bool:
    """Return whether the optimizer's state moves to CPU memory; on a CPU it is there already."""
    return config.offload and (config.hardware.kind or "cpu") != "cpu"


def kept_width(config: TrainConfig) -> int:
    """Return the bytes per number of the weights in a pass, and therefore of the residual stream."""
    return WIDE if config.precision == "fp32" or config.engine == "deepspeed" else 2


def micros_of(config: TrainConfig, layout: Layout) -> int:
    """Return how many micro-batches a step has."""
    return accumulation(config.global_batch or 1, config.micro_batch, layout.readers)


def _buffered(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    """Return the bytes of trainer.engine.rank_state.ReplicatedState."""
    width, divided = kept_width(config), config.zero >= 1 and layout.data > 1
    own = sizes.all // layout.data if divided else sizes.all
    master = WIDE - width if config.stores_remainders(config.hardware.kind or "cpu") else WIDE
    state = MOMENTS + (master if width < WIDE else 0)
    joined = (MOMENTS + WIDE - state) * own if width < WIDE else 0
    # Gloo copies the buckets that it sums; the last one is the token table.
    copied = divided and (config.hardware.kind or "cpu") == "cpu"
    sent = WIDE * sizes.table + BUCKET_BYTES if copied else 0
    if micros_of(config, layout) > 1 or layout.data > 1 or (config.parallel.sequence and layout.tensor > 1):
        return Held(width * sizes.all, state * own, WIDE * sizes.all, update=sent, joined=joined)
    # A CPU's AdamW accepts bf16 gradients.
    fused = (config.hardware.kind or "cpu") == "cpu"
    widened = WIDE * own if width < WIDE and not fused else 0
    coming = width * sizes.all
    return Held(width * sizes.all, state * own, 0, coming=coming, update=sent + widened, joined=joined)


def _sharded(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    """Return the bytes of trainer.engine.sharded.ShardedState."""
    width, own = kept_width(config), WIDE * sizes.all // layout.data
    layer_bytes = width * sizes.layer
    # With ZeRO 3: the layer in use, the next layer and its message; the tables are not divided.
    gathered = width * sizes.all + layer_bytes if config.zero == 2 else width * sizes.ends + 3 * layer_bytes
    # Gloo copies the tensors that it gathers and scatters.
    if (config.hardware.kind or "cpu") == "cpu":
        gathered += layer_bytes + WIDE * sizes.layer
    added = own if micros_of(config, layout) > 1 else 0
    return Held(own, MOMENTS * sizes.all // layout.data, added, coming=own - added, gathered=gathered)


def _deepspeed(config: TrainConfig, layout: Layout, sizes: Sizes) -> Held:
    whole, own = WIDE * sizes.all, WIDE * sizes.all // layout.data
    if not config.zero:
        return Held(whole, 2 * whole, whole)
    # Master weights and two moments.
    masters = 3 * own
    bucket = WIDE * min(DEEPSPEED_BUCKET, sizes.all)
    if config.zero == 1:
        return Held(whole, masters, whole, update=own)
    if config.zero == 2:
        return Held(whole, masters, own + 2 * bucket, update=own)
    gathered = WIDE * sizes.ends + 2 * WIDE * sizes.layer
    return Held(own, masters, own + bucket, gathered=gathered, update=own)


# As in trainer.engine.buckets.
BUCKET_BYTES = 25 << 20
# Bucket size in numbers, as in trainer.engine.deepspeed_engine.
DEEPSPEED_BUCKET = 1 << 25
