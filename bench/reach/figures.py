"""The sizes of a measurement, and its results."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from bench.reach.field import Sample


@dataclass(frozen=True)
class Sizes:
    """The sizes and numbers of runs of a measurement."""

    nodes: tuple[int, ...] = (1, 4, 16, 64, 256)
    push_nodes: int = 32
    small_nodes: tuple[int, ...] = (8, 32)
    uplink_nodes: int = 16
    line_nodes: int = 16
    storm_nodes: int = 64
    model_nodes: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    runs: int = 5
    uplink_runs: int = 1
    """Runs of peers whose time depends only on the link: 200 MB to 16 nodes at 200 Mbit/s takes 128 s."""
    storm_runs: int = 20
    megabytes: int = 200
    files: int = 2000
    lines: int = 100_000


@dataclass
class Measured:
    """The samples of one tool for one kind of work."""

    row: str
    nodes: int
    tool: str
    samples: list[Sample] = field(default_factory=list)
    missing: str = ""
    """Why the tool was not measured; "" if it was."""
    note: str = ""

    @property
    def wall(self) -> float:
        return statistics.median(sample.wall for sample in self.samples)

    @property
    def cpu(self) -> float:
        return statistics.median(sample.cpu for sample in self.samples)

    @property
    def failed(self) -> int:
        return sum(sample.failed for sample in self.samples)

    def value(self) -> dict[str, object]:
        measured = bool(self.samples)
        return {
            "row": self.row,
            "nodes": self.nodes,
            "tool": self.tool,
            "missing": self.missing,
            "note": self.note,
            "wall": self.wall if measured else None,
            "cpu": self.cpu if measured else None,
            "failed": self.failed,
            "walls": [round(sample.wall, 4) for sample in self.samples],
        }
