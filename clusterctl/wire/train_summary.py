"""The trainer's answer about a job's `train` part: its errors, or the summary of a valid one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The usable fraction of a device's memory; libraries and fragmentation take the rest.
ROOM = 0.94


@dataclass(frozen=True)
class TrainFault:
    """One error of a `train` part: its key (train.optimizer.lr), the problem, and what to write instead."""

    key: str
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class CorpusUse:
    """The use of one corpus in the training."""

    prefix: str
    sequences: int
    tokens: int
    """Tokens in the training split."""
    share: float
    """Fraction of the samples."""
    epochs: float
    """How often each of its tokens is read."""


@dataclass(frozen=True)
class LayoutSizes:
    """Ranks in each direction."""

    data: int
    tensor: int
    pipeline: int
    context: int = 1


@dataclass(frozen=True)
class ParallelSettings:
    """The job's `train.parallel`."""

    auto: bool
    tensor: int
    pipeline: int
    interleave: int
    sequence: bool
    context: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CandidateLayout:
    """A layout that `auto` compared; `why` it is worse than the chosen one, for those that lose."""

    data: int
    tensor: int
    pipeline: int
    interleave: int
    sequence: bool
    zero: int
    offload: bool
    recompute: str
    memory: int
    """Bytes on the device that needs most memory."""
    seconds: float
    tokens_per_second: float
    why: str = ""
    context: int = 1


@dataclass(frozen=True)
class AutoChoice:
    """How `auto` chose the layout."""

    tried: int
    illegal: int
    best: tuple[CandidateLayout, ...]
    losing: tuple[CandidateLayout, ...]


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage; ranges of ranks and of layers are half open."""

    ranks: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    parameters_per_rank: int
    memory: Mapping[str, int]
    """Bytes of a rank by purpose, and their total, at the peak."""
    moment: str
    """The name of the moment with the peak."""
    most_activations: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by cause, and in total."""

    compute: float
    tensor: float
    pipeline: float
    bubble: float
    data: float
    update: float
    tokens: int
    seconds: float
    tokens_per_second: float
    in_all: float
    """Seconds of the whole training."""


@dataclass(frozen=True)
class CheckpointCost:
    """The cost of one checkpoint, and of all checkpoints that are kept."""

    bytes: int
    """The size of all files of a checkpoint."""
    kept: int
    """The most checkpoints on disk at a time, including the one that is being written."""
    node_bytes: int
    """The bytes of one checkpoint on the node that writes most."""
    staging_bytes: int
    """The memory of a node for the copies of background saves; 0 without background saves."""
    seconds: float
    """Seconds from the copy to the last rename."""
    stall_seconds: float
    """The part of these seconds in which training waits."""
    stall_share: float
    """Fraction of the training's time; 0 if checkpoints are saved only at the end."""
    copies: int
    """How many nodes have a copy of each file."""
    shared: bool
    """Whether all nodes write to one disk."""
    disk_bytes: int
    """The size of all kept checkpoints and one in progress: on the node with most, or on the shared disk."""
    disk_gbytes: float
    """GB/s of a node's disk."""


@dataclass(frozen=True)
class Hardware:
    """A device and its links; a plan's times are no better than these figures."""

    kind: str
    chip: str
    devices_per_node: int
    memory: float
    """GB; 0 if unknown: nothing is compared then."""
    tflops: float
    efficiency: float
    """The fraction of `tflops` that the matrix products of a training reach."""
    node_gbytes: float
    net_gbytes: float
    memory_gbytes: float
    """GB/s between a device and its memory, which limit the optimizer's step."""
    host_gbytes: float
    """GB/s between a device and the node's memory."""
    latency: float
    """Seconds of the smallest exchange."""
    sources: Mapping[str, str]
    """The source of each figure."""

    @property
    def room(self) -> float:
        """Return the bytes that a training can use; 0 if the memory is unknown."""
        return self.memory * 1e9 * ROOM


@dataclass(frozen=True)
class TrainSummary:
    """Model, data and cost of a valid `train` part."""

    parameters: int
    trained_parameters: int
    active_parameters: int
    """Parameters that compute a token: with experts, not all."""
    layout: LayoutSizes
    parallel: ParallelSettings
    zero: int
    offload: bool
    recompute: str
    steps: int
    micro_batch: int
    accumulation: int
    bubble: float
    tokens_per_step: int
    tokens_total: int
    epochs: float | None
    """None where the data is not known."""
    corpora: tuple[CorpusUse, ...]
    memory_per_device_bytes: Mapping[str, int]
    highest_stage: int
    memory_of_the_node_bytes: int
    offload_disk_bytes: int
    """Bytes on the disk of a node; 0 without offload to NVMe."""
    memory_of_a_device_bytes: int | None
    usable_memory_bytes: int | None
    fits: bool | None
    """None where the memory of a device is not known."""
    stages: tuple[StagePlan, ...]
    time: StepTime
    checkpoints: CheckpointCost
    flops_per_token: Mapping[str, float]
    tflops_per_device: Mapping[str, float]
    conventions: Mapping[str, str]
    hardware: Hardware
    chosen: AutoChoice | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class TrainCheck:
    """The errors of a `train` part, and its summary if it has none."""

    faults: tuple[TrainFault, ...]
    summary: TrainSummary | None


@dataclass(frozen=True)
class Rehearsal:
    """Measurements of one rank of a training on this machine, and the plan's figures for it."""

    peak_bytes: int
    operations: int
    exchanges: Mapping[str, int]
    """Calls of each collective."""
    exchanged_bytes: int
    parameters: int
    planned_parameters: int
    planned_bytes: int
    layers: int
    stage: int
    rank: int
    ranks: int
    engine: str
    seconds: float
