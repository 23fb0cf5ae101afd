"""What is allowed, and surely not meant: contradictions between what a job says and what it will do.

What a job's corpora hold, and whether they can give what it asks: looked at before anything starts.

Whether a job's tokenizer fits its model: looked at before anything starts. Loads the tokenizer, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.data import Source
from trainer.config.glm import SPECIAL_TOKENS
from trainer.config.layout import Layout, accumulation
from trainer.config.model_sizes import SIZES, VOCAB_MULTIPLE, ModelConfig
from trainer.config.parts import ProfileConfig
from trainer.config.train_config import TrainConfig
from trainer.corpus.indexed import Index, look
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import Fault, TrainerError
from trainer.plan.auto import ROOM
from trainer.plan.hardware import Hardware
from trainer.plan.memory import Memory
from trainer.samples.blend import blend_fault, normal, split_fault
from trainer.samples.dataset import WHOLE
from trainer.samples.gpt import SPLITS, split_bounds, tokens_of

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


# Of a step: above it the pipeline costs more than most layouts without it.
BUBBLE = 0.25
# A corpus read more often than this teaches little that is new.
EPOCHS = 4.0


def lint(
    config: TrainConfig, layout: Layout, hardware: Hardware, need: Memory, uses: Sequence[CorpusUse]
) -> list[str]:
    """A line for each finding."""
    return [
        *_of_resuming(config),
        *_of_ramp(config),
        *_of_profile(config),
        *_precision_notes(config),
        *_of_layout(config, layout, hardware, need),
        *(
            f"{use.prefix} is read {use.epochs:.1f} times: more tokens, or fewer steps, would teach more"
            for use in uses
            if use.epochs > EPOCHS
        ),
    ]


def name_notes(name: str, config: TrainConfig) -> Iterator[str]:
    """A job whose name promises what it will not do."""
    told = name_fault(name, config.model)
    if told:
        yield told
    promised = re.search(r"(?<![a-z0-9])(fp16|bf16|fp32)(?![a-z0-9])", name.lower())
    if promised and promised[1] != config.precision:
        yield f"the job is called {name}, and trains in {config.precision} (precision)"


def name_fault(name: str, model: ModelConfig) -> str:
    """A job whose name says one size and whose model is another's; empty where it agrees, or says none."""
    told = re.search(r"(?<![0-9.])([0-9]+(?:\.[0-9]+)?)([mMbB])(?![a-zA-Z0-9])", name)
    if told is None:
        return ""
    size = float(told[1]) * (1e6 if told[2] in "mM" else 1e9)
    numbers = model.parameters()
    if 0.8 * size <= numbers <= 1.25 * size:
        return ""
    near = min(SIZES, key=lambda known: abs(SIZES[known].parameters() - size))
    found = f"{numbers / 1e9:.3g}B" if numbers >= 1e9 else f"{numbers / 1e6:.3g}M"
    return f"the job is called {name}, and its model has {found} parameters; {near} is of that size"


def _of_resuming(config: TrainConfig) -> Iterator[str]:
    if config.resume == "never" and config.save.every:
        yield "it saves every so often and resumes never: a restart begins from step 0 again (resume: auto)"
    if not config.save.every and config.steps >= 5000:
        yield f"nothing is saved before step {config.steps}: an interruption loses all of it (save: {{every: 500}})"
    if config.optimizer.schedule != "constant" and not config.optimizer.min_lr and config.optimizer.decay:
        yield "after its decay the rate is 0: those steps learn nothing (optimizer.min_lr)"


def _of_ramp(config: TrainConfig) -> Iterator[str]:
    batches = config.batches
    if config.batch_ramp.start and batches.ramp_steps >= config.steps:
        last = batches.of(config.steps)
        yield f"its batch ramp is not over at the last step, which has {last} samples of {batches.whole}"
    elif config.batch_ramp.start:
        yield f"of its steps the first {batches.ramp_steps} have fewer than {batches.whole} samples: its batch ramp"


def _of_profile(config: TrainConfig) -> Iterator[str]:
    if config.profile != ProfileConfig() and not config.profile.repeat:
        yield "nothing is profiled: profile says no number of cycles (repeat: 1)"


def _precision_notes(config: TrainConfig) -> Iterator[str]:
    if config.precision == "fp16" and config.hardware.kind == "cpu":
        yield "a CPU multiplies fp16 at a tenth of the rate of bf16, or less: precision: bf16 is faster"


def _of_layout(config: TrainConfig, layout: Layout, hardware: Hardware, need: Memory) -> Iterator[str]:
    model = config.model
    if layout.tensor > 1 and model.padded(layout.tensor) != model.padded_vocab:
        rows = model.padded(layout.tensor)
        yield f"tensor {layout.tensor} pads the vocabulary of {model.vocab} to {rows} rows ({VOCAB_MULTIPLE} x tensor)"
    if layout.tensor > hardware.devices_per_node:
        yield f"tensor {layout.tensor} spans nodes of {hardware.devices_per_node} devices: each block waits for the net"
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.data)
    bubble = (layout.pipeline - 1) / config.parallel.interleave / micros
    if bubble > BUBBLE:
        yield f"the bubble is {bubble:.0%} of the work: {micros} micro-batches for {layout.pipeline} stages"
    room = hardware.memory * 1e9
    if room and need.total > room * ROOM:
        yield f"it does not fit: {need.total / 1e9:.1f} GB of {hardware.memory:g} ({hardware.sources['memory']})"
    if config.recompute.mode != "none" and room and need.total < room / 3:
        yield f"it recomputes, and would need {need.total / room:.0%} of the memory: recompute: none is faster"
    if config.zero and layout.data == 1:
        yield f"zero {config.zero} divides nothing: there is one data parallel rank"


@dataclass(frozen=True)
class CorpusUse:
    """One corpus of the training: `epochs` says how often each of its tokens is read."""

    prefix: str
    sequences: int
    # Of the training's part.
    tokens: int
    # Of the samples.
    share: float
    epochs: float


def look_at_data(config: TrainConfig, base: Path) -> tuple[list[CorpusUse], list[Fault]]:
    """How the training uses its corpora below `base`, and all that is wrong with them."""
    indices, faults = {}, []
    for key, prefix in config.data.prefixes().items():
        index, wrong = look(base / prefix)
        faults += [Fault(key, what, remedy) for what, remedy in wrong]
        if index is not None and not wrong:
            indices[prefix] = index
    for which in ("train", "valid") if config.eval.batches else ("train",):
        faults += _part_faults(config, indices, which)
    return ([] if faults else _uses(config, indices)), faults


def _part_faults(config: TrainConfig, indices: dict[str, Index], which: str) -> Iterator[Fault]:
    """What keeps the corpora from giving the samples of train or valid."""
    data, keys = config.data, {prefix: key for key, prefix in config.data.prefixes().items()}
    split, part = (WHOLE, "train") if data.parted else (data.split, which)
    sources = [source for source in data.sources(which) if source.prefix in indices]
    there = []
    for source in sources:
        lengths = indices[source.prefix].lengths
        found = split_fault(source.prefix, lengths, split, part, config.model.sequence)
        if found:
            yield Fault(keys[source.prefix], *found)
        there.append((_tokens(indices, source, split, part) - 1) // config.model.sequence)
    read_once = len(sources) > 1 and sources[0].weight is None
    drawn = {
        "train": config.batches.consumed(config.steps),
        "valid": config.batches.whole * config.eval.batches,
    }
    if read_once and all(n > 0 for n in there) and sum(there) < drawn[which]:
        key = f"train.data.{which if data.parted else 'blend'}"
        yield Fault(key, *blend_fault(which, there, drawn[which]))


def _uses(config: TrainConfig, indices: dict[str, Index]) -> list[CorpusUse]:
    data = config.data
    split = WHOLE if data.parted else data.split
    sources = data.sources("train")
    tokens = [_tokens(indices, source, split, "train") for source in sources]
    shares = normal([source.weight or n for source, n in zip(sources, tokens, strict=True)])
    drawn = config.batches.consumed(config.steps) * config.model.sequence
    return [
        CorpusUse(source.prefix, len(indices[source.prefix].lengths), n, share, drawn * share / n)
        for source, n, share in zip(sources, tokens, shares, strict=True)
    ]


def _tokens(indices: dict[str, Index], source: Source, split: str, part: str) -> int:
    lengths = indices[source.prefix].lengths
    return tokens_of(lengths, split_bounds(split, len(lengths))[SPLITS.index(part)])


# Of the model's ids: a tokenizer with fewer leaves most of the table untrained.
FEW = 0.5


def look_at_tokenizer(config: TrainConfig, base: Path) -> tuple[list[Fault], list[str]]:
    """What keeps a training from starting with the tokenizer that the job names, and what is surely not meant."""
    if not config.data.tokenizer:
        return [], []
    file = base / config.data.tokenizer
    if not file.exists():
        return [Fault("train.data.tokenizer", f"{file} does not exist")], []
    try:
        words = Tokenizer.load(file)
    except TrainerError as error:
        return [Fault("train.data.tokenizer", error.message, error.hint)], []
    return list(_faults(config, words)), list(_notes(config, words))


def _ids(config: TrainConfig, words: Tokenizer) -> int:
    """What a model must have for the tokenizer, GLM's own on top of it included."""
    laid_on = config.model.kind != "glm" or words.glm_ids() is not None
    return words.vocab if laid_on else words.vocab + SPECIAL_TOKENS


def _faults(config: TrainConfig, words: Tokenizer) -> Iterator[Fault]:
    needed, there = _ids(config, words), config.model.vocab
    if needed > there:
        own = " with GLM's own" if config.model.kind == "glm" else ""
        yield Fault(
            "train.model.vocab", f"is {there}, but the tokenizer has {needed} ids{own}", f"use {needed}"
        )


def _notes(config: TrainConfig, words: Tokenizer) -> Iterator[str]:
    needed, there = _ids(config, words), config.model.vocab
    if needed < FEW * there:
        yield f"the tokenizer has {needed} ids and the model {there}: most of its table is never trained (model.vocab)"
    if config.data.eod is not None and config.data.eod != words.eod:
        token = words.token_of(config.data.eod)
        yield (
            f"data.eod is {config.data.eod}, which the tokenizer has as {token!r}; "
            f"its own end of a document is {words.eod}"
        )
