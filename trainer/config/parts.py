"""The sections of a training's config: frozen, each field explained. Rules between keys are in rules.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from clusterctl.wire.fields import setting
from trainer.config.amounts import amount_text, gigabytes
from trainer.config.chips import NAMES, chip_name

SCHEDULES = ("cosine", "linear", "constant", "wsd", "polynomial", "exponential")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks divide the model; the other ranks than tensor x pipeline are data parallel."""

    auto: bool = setting(False)
    """Choose tensor, pipeline, zero and recomputation by planned memory and time (`parallel: auto`)."""
    tensor: int = setting(1, least=1)
    """Tensor parallel size: neighbouring ranks that divide every matrix, best within a node."""
    pipeline: int = setting(1, least=1)
    """Pipeline stages; each has some of the layers."""
    interleave: int = setting(1, least=1)
    """Pieces of the model per stage: more pieces make a smaller bubble and more traffic between stages."""
    sequence: bool = setting(False)
    """Sequence parallel: divide along the sequence what tensor parallel does not divide (layer norms, dropout)."""
    context: int = setting(1, least=1)
    """Context parallel size: ranks that divide the tokens of each sample. Each has all weights and gathers the keys of
    the others.
    """
    layers: tuple[int, ...] = setting((), least=0)
    """Layers of each piece in the model's order. Default: an even division."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Recomputation of activations in the backward pass instead of storing them."""

    mode: str = setting("none", choices=("none", "full", "selective"))
    """full stores only the input of a layer; selective recomputes only attention's scores."""
    every: int = setting(1, least=1)
    """With full: number of layers between stored inputs."""
    split: bool = setting(False)
    """With full: divide the stored inputs among the tensor parallel ranks."""


@dataclass(frozen=True)
class LossScaleConfig:
    """The factor that fp16 multiplies the loss by, so that small gradients do not become 0."""

    initial: float = setting(2.0**32, least=1.0)
    """First scale; 2^32 is far too high on purpose: about 17 skipped steps lower it to a usable value."""
    dynamic: bool = setting(True)
    """Halve the scale after overflows, and double it after `window` steps without one. false: a fixed scale."""
    window: int = setting(1000, least=1)
    """Steps without an overflow before the scale doubles."""
    hysteresis: int = setting(2, least=1)
    """Overflows before the scale halves."""
    least: float = setting(1.0, above=0.0)
    """Lowest scale."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    lr: float = setting(3e-4, above=0.0)
    """Highest learning rate."""
    min_lr: float = setting(0.0, least=0.0)
    """Learning rate at the end of the decay."""
    weight_decay: float = setting(0.1, least=0.0)
    """Weight decay of matrices; biases and layer norms have none."""
    betas: tuple[float, float] = setting((0.9, 0.95), least=0.0, below=1.0)
    """Decay rates of the averages of the gradient and of its square."""
    eps: float = setting(1e-8, above=0.0)
    """Added to the root of the squared average."""
    clip: float = setting(1.0, least=0.0)
    """Largest norm of the gradient of all parameters together; 0 does not clip."""
    schedule: str = setting("cosine", choices=SCHEDULES)
    """How the learning rate falls from lr to min_lr after the warm-up. wsd stays at lr and falls in its last part;
    polynomial is linear to the power of `power`; exponential falls by the same factor in every step. The rate of a step
    includes its own samples: Megatron uses each of these rates one step later, so the first step of its warm-up has
    rate 0."""
    warmup_steps: int = setting(0, least=0)
    """Steps in which the rate rises from 0 to lr."""
    warmup: str = setting("", read=amount_text)
    """Warm-up in other units: `375M tokens`, `3000 samples`, `1%` of the decay."""
    decay: str = setting("", read=amount_text)
    """Length of the schedule, warm-up included; the rate is min_lr after it. Default: the training's length."""
    wsd_decay: float = setting(0.1, above=0.0, below=1.0)
    """With wsd: the last fraction of the schedule, in which the rate falls."""
    masters: str = setting("auto", choices=("auto", "remainder", "fp32"))
    """How the fp32 master values of bf16 weights are stored: `fp32` keeps a copy of 4 bytes per parameter; `remainder`
    keeps the 2 bytes that the bf16 weight lacks, with bit-identical results. `auto` is remainder on a CPU with the
    torch engine, else fp32. Checkpoints have fp32 values with both. ZeRO 2 and 3 have no bf16 weights between steps;
    their fp32 weights take the same 4 bytes."""
    power: float = setting(1.0, above=0.0)
    """With polynomial: the power of the remaining fraction of the schedule; 1 is linear."""


@dataclass(frozen=True)
class BatchRamp:
    """Small batches first: from `start` samples per step up to global_batch, in rises of `increment`, within
    `samples`.
    """

    start: int = setting(0, least=0)
    """Samples of the first step; 0: no ramp."""
    increment: int = setting(0, least=0)
    """Samples that each rise adds."""
    samples: int = setting(0, least=0)
    """Samples over which the rises are spread evenly."""


@dataclass(frozen=True)
class InitConfig:
    """Weights with which the training starts, at step 0, with a new optimizer."""

    source: str = setting("")
    """A checkpoint's folder, a run's folder (its newest checkpoint), the name of a run on the same nodes, or a folder
    of another program that `checkpoint import` reads, such as Hugging Face's."""
    extend_vocabulary: bool = setting(False)
    """Allow a larger vocabulary than the source's: the new rows are initialized as in a new model."""


EVALUATION_TASKS = ("ppl", "lambada", "wikitext", "copa", "choice")


@dataclass(frozen=True)
class EvalConfig:
    """Validation: before the first step, after the last, and in between."""

    every: int = setting(0, least=0)
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    batches: int = setting(8, least=0)
    """Global batches per evaluation, always the same ones; 0 never evaluates."""
    tasks: tuple[str, ...] = setting(())
    """Tasks that are evaluated at the same steps, as TASK=FILE with a file or a corpus on every node: ppl, lambada,
    wikitext, copa, choice. `data.tokenizer` is needed, and every rank must have all layers."""


@dataclass(frozen=True)
class KeepConfig:
    """Which checkpoints are kept on disk."""

    last: int = setting(2, least=1)
    """Number of newest checkpoints to keep."""
    every: int = setting(0, least=0)
    """Steps between checkpoints that are kept permanently; 0: none."""
    best: int = setting(0, least=0)
    """Number of checkpoints with the lowest evaluation loss to keep; 0: none."""


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
    """Write from a copy in memory while training continues; auto: if a rank saves more than 64 MB."""
    busy: str = setting("wait", choices=("wait", "skip"))
    """If a checkpoint is due while the previous one is still being written: wait for that, or skip the new one."""
    verify: str = setting("auto", choices=("auto", "always", "never"))
    """Read each checkpoint back from the disk before it counts as saved; auto: unless training waits for it."""
    dir: str = setting("")
    """A folder on a disk that all nodes share: checkpoints are in <dir>/<run>. Empty: each node keeps the files of its
    own ranks."""
    copies: int = setting(1, least=1)
    """Number of nodes with a copy of each file: with 2, losing a node loses no checkpoint."""
    to: str = setting("")
    """An object store that gets each checkpoint while training continues: s3://BUCKET/FOLDER or obs://BUCKET/FOLDER. A
    run whose nodes lost their disks resumes from there."""


@dataclass(frozen=True)
class NanConfig:
    """What happens after a loss or gradient that is not finite: the step is skipped and counted."""

    stop_after: int = setting(10, least=1)
    """Skipped steps in a row that end the training."""
    name_layer: bool = setting(True)
    """Repeat the first of such steps to find the first layer that is not finite, and its rank."""


@dataclass(frozen=True)
class ProfileConfig:
    """torch's profiler, by a schedule of steps."""

    repeat: int = setting(0, least=0)
    """Cycles of wait, warmup and active steps; 0 profiles nothing."""
    wait: int = setting(1, least=0)
    """First steps of a cycle, which are not traced."""
    warmup: int = setting(1, least=0)
    """Steps that are traced but not kept, because tracing slows them down."""
    active: int = setting(3, least=1)
    """Steps whose traces are kept; with the defaults and repeat 2: steps 2 to 4 and 7 to 9, counted from 0."""
    ranks: tuple[int, ...] = setting((0,), least=0)
    """Ranks whose traces are kept."""
    stacks: bool = setting(False)
    """Record where in the source each operation was called; traces are then larger and slower."""


@dataclass(frozen=True)
class HardwareConfig:
    """The devices for which the job is written; 0 means the value of the chip, which the plan prints."""

    kind: str = setting("", choices=("", "cpu", "cuda", "npu"))
    """The launcher fills it from the inventory."""
    chip: str = setting("", choices=("", *NAMES), read=chip_name)
    """Name of the chip, which gives its memory, number types, rates and links; without one, the plan assumes a chip."""
    devices_per_node: int = setting(0, least=0)
    """The launcher fills it from the inventory."""
    memory: float = setting(0.0, least=0.0, read=gigabytes)
    """Memory of a device: `32GB`, `80 GiB`, or a number of GB (10^9 bytes)."""
    tflops: float = setting(0.0, least=0.0)
    """Dense matrix rate of a device in the training's precision, 10^12 operations a second."""
    efficiency: float = setting(0.0, least=0.0, below=1.0)
    """Fraction of that rate that the matrix products of a training reach."""
    node_gbytes: float = setting(0.0, least=0.0)
    """GB/s that a device sends to another on the same node."""
    net_gbytes: float = setting(0.0, least=0.0)
    """GB/s that a device sends to another node."""
    disk: float = setting(0.0, least=0.0, read=gigabytes)
    """Space for checkpoints on a node's disk (with save.dir, on the shared disk): `500GB`; a training whose checkpoints
    do not fit is refused. The launcher fills it from the inventory, and asks the nodes at the start."""
