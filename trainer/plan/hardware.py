"""The figures of a device for the plan: those of the job, else those of its chip, each with its source."""

from __future__ import annotations

from clusterctl.wire.train_summary import Hardware
from native.compiled.library import attention_level
from trainer.config.chips import NAMED, Chip, default_chip
from trainer.config.train_config import TrainConfig

# GB/s of CPU memory for one device's offloaded optimizer: eight memory channels for eight devices.
UPDATED_GBYTES = 20.0
# The CPU chip for each capability of the compiled attention kernels.
CPU_LEVELS = ("cpu", "cpu-avx512", "cpu-avx512-bf16", "cpu-avx512-bf16")


def chip_of(config: TrainConfig) -> Chip:
    """Return the chip that the job names; without one, this machine's CPU, or the default of another kind of device."""
    kind = config.hardware.kind or "cpu"
    named = NAMED.get(config.hardware.chip)
    if named is not None and named.kind == kind:
        return named
    return NAMED[CPU_LEVELS[attention_level()]] if kind == "cpu" else default_chip(kind, config.precision)


def hardware_of(config: TrainConfig, world: int) -> Hardware:
    """Return the device with the job's figures, and its chip's figures for the rest."""
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
