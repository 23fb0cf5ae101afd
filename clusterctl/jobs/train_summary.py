"""The trainer's answer about a job's `train` part: its errors, or the summary of a valid one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clusterctl.typed_json import decode


@dataclass(frozen=True)
class TrainFault:
    """One error of a `train` part: its key (train.optimizer.lr), the problem, and what to write instead."""

    key: str
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class CorpusUse:
    """One corpus of the training: its part of the samples, and how often each of its tokens is read."""

    prefix: str
    tokens: int
    share: float
    epochs: float


@dataclass(frozen=True)
class LayoutSizes:
    """Ranks in each direction."""

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True)
class ParallelSettings:
    """The settings of `parallel` that the layout's sizes do not have."""

    interleave: int
    sequence: bool


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
    seconds: float
    tokens_per_second: float
    why: str = ""


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
    seconds: float
    tokens_per_second: float
    in_all: float
    """Seconds of the whole training."""


@dataclass(frozen=True)
class CheckpointCost:
    """Size and time of one checkpoint, and of all that are kept."""

    bytes: int
    kept: int
    node_bytes: int
    staging_bytes: int
    seconds: float
    stall_seconds: float
    stall_share: float
    copies: int
    shared: bool
    disk_bytes: int
    disk_gbytes: float
    """GB/s of a node's disk."""


@dataclass(frozen=True)
class DevicePlan:
    """The figures of a device, 0 where unknown, and where each is from."""

    memory: float
    tflops: float
    efficiency: float
    node_gbytes: float
    net_gbytes: float
    sources: Mapping[str, str]


@dataclass(frozen=True)
class TrainSummary:
    """Model, data and cost of a valid `train` part."""

    parameters: int
    trained_parameters: int
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
    hardware: DevicePlan
    chosen: AutoChoice | None
    notes: tuple[str, ...]
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The trainer's own JSON object, which `plan --json` prints."""


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


def read_check(answer: Mapping[str, Any]) -> TrainCheck:
    """Return the trainer's answer to a check; raise BadValue for any other object."""
    check = decode(TrainCheck, answer)
    if check.summary is None:
        return check
    return replace(check, summary=replace(check.summary, answer=answer["summary"]))
