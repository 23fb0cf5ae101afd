"""Seconds of a step: the slowest stage's matrices and exchanges, the pipeline's bubble, and data parallel exchanges.

This model is for comparing layouts and for a rough estimate: `efficiency` includes all kernels that are not matrix
products, and links are assumed to carry no other traffic.

It also counts floating point operations per token, by each usual convention; the conventions differ by up to a half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clusterctl.wire.train_summary import Hardware
from trainer.config.attention import WIDE
from trainer.config.layout import Layout, accumulation
from trainer.config.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.plan.activations import MicroBatch
from trainer.plan.hardware import UPDATED_GBYTES
from trainer.plan.memory import (
    layer_ranges,
    layers_of,
    learned_sizes,
    micro_batch_of,
    moves_optimizer,
    sizes_of,
)

UPDATE = (
    # Bytes per parameter that AdamW reads (weight, gradient, two moments) and writes (all but the gradient).
    28
)
# Exchanges per block among tensor parallel ranks: two in each pass.
EXCHANGES = 4


@dataclass(frozen=True)
class Cost:
    """Seconds of one step, by cause."""

    compute: float
    tensor: float
    """Tensor parallel exchanges."""
    pipeline: float
    """Messages between stages."""
    bubble: float
    """Waiting while the pipeline fills and empties."""
    data: float
    """Data parallel exchanges that do not overlap with computation."""
    update: float
    tokens: int
    """Tokens per step."""

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.pipeline + self.bubble + self.data + self.update

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def shortened(cost: Cost, tokens: int, part: float) -> Cost:
    """Return the cost of a step whose samples have `part` of the longest length, and `tokens` together."""
    names = ("compute", "tensor", "pipeline", "bubble")
    return replace(cost, tokens=tokens, **{name: getattr(cost, name) * part for name in names})


def cost(config: TrainConfig, layout: Layout, hardware: Hardware) -> Cost:
    """Return the cost of one step in a layout."""
    micro = micro_batch_of(config, layout)
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.readers)
    # With an uneven division a middle stage may be the slowest.
    looked_at = sorted({0, layout.pipeline // 2, layout.pipeline - 1})
    computes = {stage: _compute(config, layout, micro, hardware, stage) for stage in looked_at}
    slowest = max(looked_at, key=lambda stage: computes[stage])
    layers = sum(end - start for start, end in layer_ranges(config, layout, slowest))
    compute, tensor = computes[slowest], _tensor(config, layout, micro, hardware, layers)
    pipeline = _pipeline(config, layout, micro, hardware)
    part = (layout.pipeline - 1) / config.parallel.interleave
    ends = {0, layout.pipeline - 1}
    numbers = max(learned_sizes(config, layout, sizes_of(config, layout, stage)).all for stage in ends)
    # On a CPU the same cores compute and exchange, so nothing overlaps.
    hidden = 0.0 if hardware.kind == "cpu" else compute * 2 / 3
    return Cost(
        micros * compute,
        micros * tensor,
        micros * pipeline,
        part * (compute + tensor + pipeline),
        _data(config, layout, hardware, numbers, micros, hidden),
        _update(config, layout, hardware, numbers),
        (config.global_batch or 1) * config.model.sequence,
    )


def _compute(config: TrainConfig, layout: Layout, micro: MicroBatch, hardware: Hardware, stage: int) -> float:
    """Return the seconds of one micro-batch's forward and backward passes through a stage."""
    model, passes = config.model, passes_of(config)
    work = sum(
        passes * layer_forward(layer) + recomputed(layer, config.recompute.mode)
        for layer in layers_of(config, layout, stage)
    )
    if stage == layout.pipeline - 1:
        work += passes * head_forward(model, layout.tensor)
    return micro.tokens * work / layout.tensor / (hardware.tflops * 1e12 * hardware.efficiency)


def _tensor(config: TrainConfig, layout: Layout, micro: MicroBatch, hardware: Hardware, layers: int) -> float:
    if layout.tensor == 1:
        return 0.0
    size = micro.width * micro.tokens * config.model.hidden
    times = layers * (EXCHANGES + (2 if config.recompute.mode == "full" else 0)) + 2
    return times * _summed(size, layout.tensor, _link(hardware, layout.tensor), hardware.latency)


def _pipeline(config: TrainConfig, layout: Layout, micro: MicroBatch, hardware: Hardware) -> float:
    """Return the seconds in which a stage's pieces send activations to the next stage and gradients back."""
    if layout.pipeline == 1:
        return 0.0
    size = WIDE * micro.own_tokens * config.model.hidden
    each = size / (_link(hardware, layout.world) * 1e9) + hardware.latency
    return 2 * config.parallel.interleave * each


def _data(
    config: TrainConfig, layout: Layout, hardware: Hardware, numbers: int, micros: int, hidden: float
) -> float:
    """Return the seconds to sum gradients and gather weights; `hidden`: seconds that overlap with computation."""
    if layout.data == 1:
        return 0.0
    size, link = WIDE * numbers, _link(hardware, layout.tensor * layout.data)
    around = _around(size, layout.data, link, hardware.latency)
    if config.zero == 3:
        # Per micro-batch: gather the weights for both passes, and divide the gradients.
        whole = 3 * micros * around
        return max(whole - micros * hidden, around)
    # With ZeRO each rank gets the sums of its share alone.
    summing = around if config.zero else _summed(size, layout.data, link, hardware.latency)
    return max(summing - hidden, 0.0) + (around if config.zero else 0.0)


def _update(config: TrainConfig, layout: Layout, hardware: Hardware, numbers: int) -> float:
    """Return the seconds of AdamW, limited by memory speed; with `offload`, on the CPU and with both transfers."""
    own = numbers / (layout.data if config.zero else 1)
    if not moves_optimizer(config):
        return UPDATE * own / (hardware.memory_gbytes * 1e9)
    return UPDATE * own / (UPDATED_GBYTES * 1e9) + 2 * WIDE * own / (hardware.host_gbytes * 1e9)


def _link(hardware: Hardware, reach: int) -> float:
    """Return the GB/s within a group of `reach` consecutive ranks."""
    return hardware.node_gbytes if reach <= hardware.devices_per_node else hardware.net_gbytes


def _around(size: float, ranks: int, gbytes: float, latency: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `size` bytes."""
    return (ranks - 1) / ranks * size / (gbytes * 1e9) + latency


def _summed(size: float, ranks: int, gbytes: float, latency: float) -> float:
    return 2 * _around(size, ranks, gbytes, latency)


# How operations are counted; a figure without its convention means nothing.
CONVENTIONS = {
    # Three passes, half of attention (causal), no recomputation.
    "model": "as Megatron-LM counts",
    "hardware": "as Megatron-LM counts, with recomputation",
    # 6 x parameters + 12 x layers x hidden x sequence: all of attention.
    "palm": "as nanoGPT and PaLM count",
}


def layer_forward(model: ModelConfig) -> int:
    """Return the operations per token in one block, forward."""
    return 2 * model.used_matrix_parameters() + model.attention.operations(model.sequence)


def head_forward(model: ModelConfig, tensor: int = 1) -> int:
    """Return the operations of the output matrix per token, over all tensor parallel ranks."""
    return 2 * model.padded(tensor) * model.hidden


def recomputed(model: ModelConfig, mode: str) -> int:
    """Return the operations that recomputation repeats for one token in one block."""
    attention = model.attention.operations(model.sequence)
    return {"none": 0, "full": layer_forward(model), "selective": attention}[mode]


def passes_of(config: TrainConfig) -> int:
    """Return the passes through each matrix: forward, the input's gradient, and the weights' unless they are frozen."""
    return 2 if config.tune.lora.rank else 3


def per_token(model: ModelConfig, recompute: str = "none", passes: int = 3) -> dict[str, int]:
    """Return the operations of training per token, by convention."""
    layers = model.each_layer
    products = passes * (sum(map(layer_forward, layers)) + head_forward(model))
    # A token embedding that is not the output matrix multiplies nothing.
    numbers = model.active_parameters() - (0 if model.tied else model.vocab * model.hidden)
    return {
        "model": products,
        "hardware": products + sum(recomputed(layer, recompute) for layer in layers),
        "palm": passes * (2 * numbers + model.layers * model.attention.whole_scores(model.sequence)),
    }
