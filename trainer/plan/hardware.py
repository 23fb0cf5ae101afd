"""What the plan takes a device to be: the job's own figures, else known ones of its kind, with where they are from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True)
class Hardware:
    """One device and its links; times of a plan are no better than these."""

    kind: str
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
    """Where each figure is from, in words."""

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class _Known:
    name: str
    memory: float
    half: float
    full: float
    efficiency: float
    node_gbytes: float
    net_gbytes: float
    memory_gbytes: float
    host_gbytes: float
    latency: float


# GB/s that the processors of a node have for one device's optimizer: eight channels of memory for eight devices.
UPDATED_GBYTES = 20.0
KNOWN = {
    # A rank of one Zen 4 core, as measured: 219 GFLOP/s in bf16 and 95 in fp32; 64 MiB summed by gloo in 45 ms.
    "cpu": _Known("one core of a server", 0.0, 0.219, 0.095, 0.8, 1.5, 1.0, 15.0, 15.0, 3e-4),
    # NVIDIA's sheet: 312 TFLOP/s dense, 80 GB, NVLink 300 GB/s a direction; 200 Gbit/s a device to other nodes,
    # PCIe 25 GB/s.
    "cuda": _Known("an A100 of 80 GB", 80.0, 312.0, 19.5, 0.5, 300.0, 25.0, 2000.0, 25.0, 2e-5),
    # Ascend 910: 256 TFLOP/s in fp16, 32 GB; 30 GB/s to a neighbour, 100 Gbit/s RoCE a device.
    "npu": _Known("an Ascend 910 of 32 GB", 32.0, 256.0, 16.0, 0.35, 30.0, 12.5, 1200.0, 25.0, 3e-5),
}


def hardware_of(config: TrainConfig, world: int) -> Hardware:
    """The job's figures over the known ones."""
    told, kind = config.hardware, config.hardware.kind or "cpu"
    known = KNOWN[kind]
    rate = known.full if config.precision == "fp32" else known.half
    figures = {
        "memory": (told.memory, known.memory),
        "tflops": (told.tflops, rate),
        "efficiency": (told.efficiency, known.efficiency),
        "node_gbytes": (told.node_gbytes, known.node_gbytes),
        "net_gbytes": (told.net_gbytes, known.net_gbytes),
    }
    assumed = f"assumed: {known.name}"
    sources = {name: "train.hardware" if given else assumed for name, (given, _) in figures.items()}
    values = {name: given or usual for name, (given, usual) in figures.items()}
    per_node = told.devices_per_node or world
    return Hardware(
        kind,
        per_node,
        **values,
        memory_gbytes=known.memory_gbytes,
        host_gbytes=known.host_gbytes,
        latency=known.latency,
        sources=sources,
    )
