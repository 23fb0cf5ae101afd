"""What the plan takes a device to be: the job's own figures, else those of its chip, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from native.compiled.library import attention_level
from trainer.config.chips import NAMED, Chip, default_chip

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


# Of a device's memory; libraries, and what an allocator cannot use, take the rest.
ROOM = 0.94


@dataclass(frozen=True)
class Hardware:
    """One device and its links; times of a plan are no better than these."""

    kind: str
    chip: str
    devices_per_node: int
    memory: float
    """GB; 0 where nothing is known, and nothing is compared then."""
    tflops: float
    efficiency: float
    """The part of `tflops` that a training's matrices reach."""
    node_gbytes: float
    net_gbytes: float
    memory_gbytes: float
    """GB/s between a device and its memory: the optimizer's step is bound by it."""
    host_gbytes: float
    """GB/s between a device and the node's memory."""
    latency: float
    """Seconds that the smallest exchange takes."""
    sources: dict[str, str]
    """Where each figure is from."""

    @property
    def room(self) -> float:
        """Bytes that a training can use; 0 where the memory is not known."""
        return self.memory * 1e9 * ROOM

    def as_json(self) -> dict[str, object]:
        return dict(self.__dict__)


# GB/s that the processors of a node have for one device's optimizer: eight channels of memory for eight devices.
UPDATED_GBYTES = 20.0
# Names of the CPU chips, by what the compiled attention kernels can compute on them.
CPU_LEVELS = ("cpu", "cpu-avx512", "cpu-avx512-bf16", "cpu-avx512-bf16")


def chip_of(config: TrainConfig) -> Chip:
    """Return the chip that the job names, else one assumed: of CPUs this machine's, of others a kind's default."""
    kind = config.hardware.kind or "cpu"
    named = NAMED.get(config.hardware.chip)
    if named is not None and named.kind == kind:
        return named
    return NAMED[CPU_LEVELS[attention_level()]] if kind == "cpu" else default_chip(kind, config.precision)


def hardware_of(config: TrainConfig, world: int) -> Hardware:
    """Return the device: the job's figures, else its chip's."""
    given, chip = config.hardware, chip_of(config)
    figures = {
        "memory": (given.memory, chip.memory),
        "tflops": (given.tflops, chip.full if config.precision == "fp32" else chip.half),
        "efficiency": (given.efficiency, chip.efficiency),
        "node_gbytes": (given.node_gbytes, chip.node_gbytes),
        "net_gbytes": (given.net_gbytes, chip.net_gbytes),
    }
    usual = chip.title if given.chip == chip.name else f"assumed: {chip.title}"
    return Hardware(
        chip.kind,
        chip.name,
        given.devices_per_node or world,
        **{name: own or known for name, (own, known) in figures.items()},
        memory_gbytes=chip.memory_gbytes,
        host_gbytes=chip.host_gbytes,
        latency=chip.latency,
        sources={name: "train.hardware" if own else usual for name, (own, _) in figures.items()},
    )
