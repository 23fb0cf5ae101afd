"""The rates of a training by several conventions, their fraction of the peak rate, and the ranks' peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterctl.wire.metrics import MemoryTaken, StepDone
from trainer.config.chips import reported_chip
from trainer.config.layout import Layout
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.parallel.group import Group
from trainer.plan.hardware import hardware_of
from trainer.plan.memory import stages
from trainer.plan.time import CONVENTIONS, passes_of, per_token

# The conventions that the console shows; metrics have all of them.
SHOWN = ("palm", "hardware")


@dataclass(frozen=True)
class Rates:
    """The operations per token by each convention, and the peak rate of a device."""

    flops: Mapping[str, int]
    devices: int
    peak: float
    """TFLOP/s of a device; 0 if unknown."""
    source: str
    """The source of the peak rate."""

    @classmethod
    def of(cls, config: TrainConfig, world: int, kind: str, name: str, threads: int) -> Rates:
        """Return the rates on `world` devices; `name` is the device's name, `threads` the cores of a rank on a CPU."""
        hardware = hardware_of(replace(config, hardware=replace(config.hardware, kind=kind)), world)
        peak, source = hardware.tflops, hardware.sources["tflops"]
        reported = reported_chip(name)
        if not config.hardware.tflops and kind == "cpu":
            peak, source = peak * threads, f"{source}, x {threads} threads"
        elif not config.hardware.tflops and reported is not None:
            peak = reported.full if config.precision == "fp32" else reported.half
            source = f"the sheet of {reported.name}"
        return cls(per_token(config.model, config.recompute.mode, passes_of(config)), world, peak, source)

    def tflops(self, tokens_per_second: float) -> dict[str, float]:
        """Return the TFLOP/s of a device by each convention."""
        return {name: each * tokens_per_second / self.devices / 1e12 for name, each in self.flops.items()}

    def of_step(self, step: StepDone) -> dict[str, object]:
        """Return the rates of a step for its metrics, in addition to tokens per second."""
        tflops = self.tflops(step.tokens_per_second)
        return {
            "samples_per_second": step.samples / step.step_seconds if step.step_seconds else 0.0,
            "tflops": tflops,
            "of_peak": {name: rate / self.peak for name, rate in tflops.items()} if self.peak else {},
        }

    def text(self, tokens_per_second: float) -> str:
        """Return a text such as `TFLOP/s per device: palm 0.361 (82.1%), hardware 0.33 (75.0%)`."""
        tflops = self.tflops(tokens_per_second)
        shares = {name: f" ({tflops[name] / self.peak:.1%})" if self.peak else "" for name in SHOWN}
        return "TFLOP/s per device: " + ", ".join(
            f"{name} {tflops[name]:.3g}{shares[name]}" for name in SHOWN
        )

    def as_json(self) -> dict[str, object]:
        """Return the values for the `start` event of the metrics."""
        return {
            "flops_per_token": dict(self.flops),
            "peak_tflops": self.peak,
            "peak_source": self.source,
            "conventions": CONVENTIONS,
        }


class MemoryReport:
    """Reports the peak memory of every rank's device; on a CPU, minus the memory of the process before training."""

    def __init__(self, device: Device, group: Group, planned: Sequence[int], before: int) -> None:
        self.device, self.group, self.planned, self.before = device, group, tuple(planned), before

    def __call__(self, step: int) -> MemoryTaken:
        """Return the peaks of all ranks. A collective over all ranks."""
        highest = self.group.gather(max(0, self.device.memory_peak() - self.before))
        return MemoryTaken(step, tuple(highest), self.planned)


def planned_bytes(config: TrainConfig, layout: Layout, kind: str) -> list[int]:
    """Return the bytes that the plan counts for each rank on devices of a kind."""
    planned = replace(config, hardware=replace(config.hardware, kind=kind))
    totals = [stage.memory.total for stage in stages(planned, layout)]
    return [totals[layout.place(rank)[0]] for rank in range(layout.world)]


def memory_line(taken: MemoryTaken) -> str:
    """Return a line such as `memory at step 1: at most 1.20 GB, rank 3 (planned 1.15 GB)`."""
    highest = max(range(len(taken.bytes)), key=lambda rank: taken.bytes[rank])
    where = f", rank {highest}" if len(taken.bytes) > 1 else ""
    planned = f" (planned {_size(taken.planned[highest])})" if taken.planned else ""
    return f"memory at step {taken.step}: at most {_size(taken.bytes[highest])}{where}{planned}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
