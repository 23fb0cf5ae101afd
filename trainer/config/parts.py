"""The sections of a training's config: frozen, each field explained. Rules between keys are in rules.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.config.amounts import amount_text, gigabytes
from trainer.config.chips import NAMES
from trainer.config.reader import setting

SCHEDULES = ("cosine", "linear", "constant", "wsd", "polynomial", "exponential")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks divide the model; what tensor x pipeline leave of them is data parallel."""

    auto: bool = setting(False)
    """Choose tensor, pipeline, zero and recomputation by the plan's model of memory and time (`parallel: auto`)."""
    tensor: int = setting(1, least=1)
    """Ranks that share every matrix; neighbours, best within a node."""
    pipeline: int = setting(1, least=1)
    """Stages; each has some of the layers."""
    interleave: int = setting(1, least=1)
    """Pieces of the model per stage: more pieces make a smaller bubble and more traffic between stages."""
    sequence: bool = setting(False)
    """Divide what tensor parallel leaves whole (layer norms, dropout) along the sequence."""
    context: int = setting(1, least=1)
    """Ranks that share each sample: each has all weights and a stretch of the tokens, and sees the others' keys."""
    layers: tuple[int, ...] = setting((), least=0)
    """Layers of each piece in the model's order, where an even division is not wanted."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that are computed again in the backward pass instead of kept."""

    mode: str = setting("none", choices=("none", "full", "selective"))
    """full keeps a layer's input alone; selective computes only attention's scores again."""
    every: int = setting(1, least=1)
    """With full: so many layers between kept inputs."""
    split: bool = setting(False)
    """With full: divide the kept inputs among the tensor parallel ranks."""


@dataclass(frozen=True)
class LossScaleConfig:
    """What fp16 multiplies the loss by, so that small gradients are not lost."""

    initial: float = setting(2.0**32, least=1.0)
    """First scale; 2^32 is far too high on purpose, and some 17 skipped steps calibrate it."""
    dynamic: bool = setting(True)
    """Halve it after overflows, double it after `window` clean steps; else it stays."""
    window: int = setting(1000, least=1)
    """Clean steps before the scale doubles."""
    hysteresis: int = setting(2, least=1)
    """Overflows before the scale halves."""
    least: float = setting(1.0, above=0.0)
    """Lowest scale."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the schedule of its rate."""

    lr: float = setting(3e-4, above=0.0)
    """Highest learning rate."""
    min_lr: float = setting(0.0, least=0.0)
    """Rate at the end of the decay."""
    weight_decay: float = setting(0.1, least=0.0)
    """Decay of matrices; biases and layer norms have none."""
    betas: tuple[float, float] = setting((0.9, 0.95), least=0.0, below=1.0)
    """Averaging of the gradient and of its square."""
    eps: float = setting(1e-8, above=0.0)
    """Added to the root of the squared average."""
    clip: float = setting(1.0, least=0.0)
    """Largest norm of the gradient of all parameters together; 0 leaves it as it is."""
    schedule: str = setting("cosine", choices=SCHEDULES)
    """How the rate goes from lr to min_lr after the warm-up; wsd stays at lr and falls in its last part. polynomial is
    linear to the power of `power`; exponential falls by the same factor in every step. A step's own samples count for
    its rate: Megatron gives each of these rates one step later, and its first step of a warm-up has rate 0."""
    warmup_steps: int = setting(0, least=0)
    """Steps in which the rate rises from 0 to lr."""
    warmup: str = setting("", read=amount_text)
    """The same in other units: `375M tokens`, `3000 samples`, `1%` of the decay."""
    decay: str = setting("", read=amount_text)
    """Length of the schedule, warm-up included; min_lr after it. The whole training if left out."""
    wsd_decay: float = setting(0.1, above=0.0, below=1.0)
    """With wsd: the part of the schedule, its last, in which the rate falls."""
    masters: str = setting("auto", choices=("auto", "remainder", "fp32"))
    """How the fp32 values of bf16 weights are stored: `fp32` keeps a copy of 4 bytes a parameter; `remainder` keeps the
    2 bytes that the weight lacks, with the same results to the last bit. `auto` is remainder on a CPU with the torch
    engine, else fp32. Checkpoints have fp32 values with both. ZeRO 2 and 3 have no bf16 weights between steps, and
    their fp32 ones take the same 4 bytes."""
    power: float = setting(1.0, above=0.0)
    """With polynomial: the power of the part of the schedule that is left; 1 is linear."""


@dataclass(frozen=True)
class BatchRamp:
    """Small batches first: from `start` samples a step up to global_batch, by `increment`, within `samples`."""

    start: int = setting(0, least=0)
    """Samples of the first step; 0 has no ramp."""
    increment: int = setting(0, least=0)
    """Samples that each rise adds."""
    samples: int = setting(0, least=0)
    """Samples over which the rises are spread evenly."""


@dataclass(frozen=True)
class InitConfig:
    """Weights that the training begins with, at step 0, with a new optimizer."""

    source: str = setting("")
    """A checkpoint's folder, a run's folder (its newest checkpoint), the name of a run on the same nodes, or a folder
    of another program that `checkpoint import` reads, such as Hugging Face's."""
    extend_vocabulary: bool = setting(False)
    """Allow a larger vocabulary than the source's: its further rows begin as those of a new model."""


EVALUATION_TASKS = ("ppl", "lambada", "wikitext", "copa", "choice")


@dataclass(frozen=True)
class EvalConfig:
    """Validation: before the first step, after the last, and in between."""

    every: int = setting(0, least=0)
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    batches: int = setting(8, least=0)
    """Global batches an evaluation, always the same ones; 0 never evaluates."""
    tasks: tuple[str, ...] = setting(())
    """Tasks that are evaluated at the same steps, as TASK=FILE with a file or a corpus of every node: ppl, lambada,
    wikitext, copa, choice. `data.tokenizer` is needed, and every rank must have all layers."""


@dataclass(frozen=True)
class KeepConfig:
    """Which checkpoints stay on disk; one that fits several keys is counted once."""

    last: int = setting(2, least=1)
    """Newest checkpoints."""
    every: int = setting(0, least=0)
    """Steps between checkpoints that are kept for good; 0 keeps none of them."""
    best: int = setting(0, least=0)
    """Checkpoints with the lowest evaluation loss; 0 keeps none of them."""


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints: after the last step, on SIGTERM, and in between."""

    every: int = setting(0, least=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: KeepConfig = field(default_factory=KeepConfig)
    """Checkpoints to keep: a number of the newest, or a mapping of last, every, best."""
    state: str = setting("all", choices=("all", "weights"))
    """weights leaves out the optimizer's moments: a third of the size, but training cannot resume from it."""
    background: str = setting("auto", choices=("auto", "always", "never"))
    """Write while training continues, from a copy in memory; auto does so where a rank saves more than 64 MB."""
    busy: str = setting("wait", choices=("wait", "skip"))
    """When a checkpoint is due while the one before is still being written: wait for it, or skip the new one."""
    verify: str = setting("auto", choices=("auto", "always", "never"))
    """Read each checkpoint back from the disk before it counts as saved; auto does so unless training waits for it."""
    dir: str = setting("")
    """A folder on a disk that all nodes share, for checkpoints that are written once and read by all; they go into
    <dir>/<run>. Empty: each node keeps the files of its own ranks."""
    copies: int = setting(1, least=1)
    """Nodes that hold each file of a checkpoint: with 2, losing a node loses no checkpoint."""
    to: str = setting("")
    """An object store that gets each checkpoint while training continues: s3://BUCKET/FOLDER or obs://BUCKET/FOLDER. A
    run whose nodes lost their disks resumes from there."""


@dataclass(frozen=True)
class NanConfig:
    """What follows a loss or gradient that is not finite: the step is skipped and counted."""

    stop_after: int = setting(10, least=1)
    """Skipped steps in a row that end the training."""
    name_layer: bool = setting(True)
    """Find the first layer that is not finite, and its rank, by one more pass over the first of such batches."""


@dataclass(frozen=True)
class ProfileConfig:
    """torch's profiler, by a schedule of steps."""

    repeat: int = setting(0, least=0)
    """Cycles of wait, warmup and active steps; 0 profiles nothing."""
    wait: int = setting(1, least=0)
    """Steps of a cycle that pass first."""
    warmup: int = setting(1, least=0)
    """Steps that are traced and thrown away: tracing slows the first ones down."""
    active: int = setting(3, least=1)
    """Steps that are kept; with the defaults and repeat 2, steps 2 to 4 and 7 to 9 counted from 0."""
    ranks: tuple[int, ...] = setting((0,), least=0)
    """Ranks whose traces are kept."""
    stacks: bool = setting(False)
    """Where in the source each operation was called: larger and slower traces."""


@dataclass(frozen=True)
class HardwareConfig:
    """The devices that the job is written for; 0 takes the value of the chip, and the plan prints which."""

    kind: str = setting("", choices=("", "cpu", "cuda", "npu"))
    """The launcher fills it from the inventory."""
    chip: str = setting("", choices=("", *NAMES))
    """The device by name, which gives its memory, types, rates and links; a plan assumes one where none is named."""
    devices_per_node: int = setting(0, least=0)
    """The launcher fills it from the inventory."""
    memory: float = setting(0.0, least=0.0, read=gigabytes)
    """Memory of a device: `32GB`, `80 GiB`, or a number of GB (10^9 bytes)."""
    tflops: float = setting(0.0, least=0.0)
    """Dense matrix rate of a device in the training's precision, 10^12 operations a second."""
    efficiency: float = setting(0.0, least=0.0, below=1.0)
    """Part of that rate which a training's matrices reach."""
    node_gbytes: float = setting(0.0, least=0.0)
    """GB/s that a device sends to another of its node."""
    net_gbytes: float = setting(0.0, least=0.0)
    """GB/s that a device sends to another node."""
    disk: float = setting(0.0, least=0.0, read=gigabytes)
    """Space for checkpoints on a node's disk (with save.dir, on the shared disk): `500GB`; a training whose checkpoints
    do not fit is refused. The launcher fills it from the inventory, and asks the nodes at the start."""
