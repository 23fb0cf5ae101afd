"""What the ranks' memory was at its highest, beside what the plan said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer.config import TrainConfig
from trainer.device import Device
from trainer.events import MemoryTaken
from trainer.group import Group
from trainer.layout import Layout
from trainer.plan_memory import stages


class MemoryReport:
    """Bytes that every rank's device has held at most; on a CPU, what the process had before is not counted."""

    def __init__(self, device: Device, group: Group, planned: Sequence[int], before: int) -> None:
        self.device, self.group, self.planned, self.before = device, group, tuple(planned), before

    def __call__(self, step: int) -> MemoryTaken:
        """For all ranks together."""
        highest = self.group.gather(max(0, self.device.memory_peak() - self.before))
        return MemoryTaken(step, tuple(highest), self.planned)


def planned_bytes(config: TrainConfig, layout: Layout, kind: str) -> list[int]:
    """What the plan counts for each rank on devices of a kind."""
    there = replace(config, hardware=replace(config.hardware, kind=kind))
    each = [stage.memory.total for stage in stages(there, layout)]
    return [each[layout.place(rank)[0]] for rank in range(layout.world)]


def memory_line(taken: MemoryTaken) -> str:
    """`memory at step 1: at most 1.20 GB, rank 3 (planned 1.15 GB)`."""
    highest = max(range(len(taken.bytes)), key=lambda rank: taken.bytes[rank])
    where = f", rank {highest}" if len(taken.bytes) > 1 else ""
    planned = f" (planned {_size(taken.planned[highest])})" if taken.planned else ""
    return f"memory at step {taken.step}: at most {_size(taken.bytes[highest])}{where}{planned}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
