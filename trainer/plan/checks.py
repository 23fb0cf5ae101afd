"""Notes about a job that is legal but probably a mistake, because its settings contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from clusterctl.wire.train_summary import CorpusUse, Hardware
from trainer.config.layout import Layout, accumulation
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.config.parts import ProfileConfig
from trainer.config.train_config import TrainConfig
from trainer.plan.memory import Memory

# Fraction of a step; with a larger pipeline bubble most layouts without a pipeline are faster.
BUBBLE = 0.25
# Reading a corpus more often than this improves the model little.
EPOCHS = 4.0


def lint(
    config: TrainConfig, layout: Layout, hardware: Hardware, need: Memory, uses: Sequence[CorpusUse]
) -> list[str]:
    """Return one line per note."""
    return [
        *_of_resuming(config),
        *_of_ramp(config),
        *_of_profile(config),
        *_precision_notes(config),
        *_of_layout(config, layout, hardware, need),
        *(
            f"{use.prefix} is read {use.epochs:.1f} times: use more tokens or fewer steps"
            for use in uses
            if use.epochs > EPOCHS
        ),
    ]


def name_notes(name: str, config: TrainConfig) -> Iterator[str]:
    """Yield a note for each part of the job's name that contradicts its config."""
    found = name_fault(name, config.model)
    if found:
        yield found
    promised = re.search(r"(?<![a-z0-9])(fp16|bf16|fp32)(?![a-z0-9])", name.lower())
    if promised and promised[1] != config.precision:
        yield f"the job is called {name}, but it trains in {config.precision} (precision)"


def name_fault(name: str, model: ModelConfig) -> str:
    """Return a note if the job's name contains another size than its model has, else ""."""
    found = re.search(r"(?<![0-9.])([0-9]+(?:\.[0-9]+)?)([mMbB])(?![a-zA-Z0-9])", name)
    if found is None:
        return ""
    size = float(found[1]) * (1e6 if found[2] in "mM" else 1e9)
    numbers = model.parameters()
    if 0.8 * size <= numbers <= 1.25 * size:
        return ""
    closest = min(SIZES, key=lambda known: abs(SIZES[known].parameters() - size))
    written = f"{numbers / 1e9:.3g}B" if numbers >= 1e9 else f"{numbers / 1e6:.3g}M"
    return f"the job is called {name}, but its model has {written} parameters; {closest} has that size"


def _of_resuming(config: TrainConfig) -> Iterator[str]:
    if config.resume == "never" and config.save.every:
        yield "it saves checkpoints but does not resume: a restart begins at step 0 (resume: auto)"
    if not config.save.every and config.steps >= 5000:
        yield f"nothing is saved before step {config.steps}: an earlier interruption loses all (save: {{every: 500}})"
    if config.optimizer.schedule != "constant" and not config.optimizer.min_lr and config.optimizer.decay:
        yield "the learning rate is 0 after its decay: those steps learn nothing (optimizer.min_lr)"


def _of_ramp(config: TrainConfig) -> Iterator[str]:
    batches = config.batches
    if config.batch_ramp.start and batches.ramp_steps >= config.steps:
        last = batches.of(config.steps)
        yield f"the batch ramp does not end before the last step, which has {last} of {batches.whole} samples"
    elif config.batch_ramp.start:
        yield f"the first {batches.ramp_steps} steps have fewer than {batches.whole} samples: the batch ramp"


def _of_profile(config: TrainConfig) -> Iterator[str]:
    if config.profile != ProfileConfig() and not config.profile.repeat:
        yield "nothing is profiled: profile has no number of cycles (repeat: 1)"


def _precision_notes(config: TrainConfig) -> Iterator[str]:
    if config.precision == "fp16" and config.hardware.kind == "cpu":
        yield "a CPU computes in fp16 at most a tenth as fast as in bf16 (precision: bf16)"


def _of_layout(config: TrainConfig, layout: Layout, hardware: Hardware, need: Memory) -> Iterator[str]:
    model = config.model
    if layout.tensor > 1 and model.padded(layout.tensor) != model.padded_vocab:
        rows = model.padded(layout.tensor)
        unit = f"{model.vocab_multiple} x tensor"
        yield f"tensor {layout.tensor} pads the vocabulary of {model.vocab} to {rows} rows ({unit})"
    if layout.tensor > hardware.devices_per_node:
        yield f"tensor {layout.tensor} spans nodes of {hardware.devices_per_node} devices: blocks wait for the network"
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.readers)
    bubble = (layout.pipeline - 1) / config.parallel.interleave / micros
    if bubble > BUBBLE:
        yield f"the bubble is {bubble:.0%} of the work: {micros} micro-batches for {layout.pipeline} stages"
    room = hardware.memory * 1e9
    if config.recompute.mode != "none" and room and need.total < room / 3:
        yield f"it recomputes, but would need {need.total / room:.0%} of the memory: recompute: none is faster"
    if config.zero and layout.data == 1:
        yield f"zero {config.zero} divides nothing: there is one data parallel rank"
