"""Measure the memory and load of a run's devices: from nvidia-smi, npu-smi, or on CPUs from /proc of the ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.ranktable.devices import VENDOR_SMI
from clusterctl.transport.fanout import within

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.runs.state import RankState
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections

NVIDIA = [
    "nvidia-smi",
    "--query-gpu=index,memory.used,memory.total,utilization.gpu",
    "--format=csv,noheader,nounits",
]
# Limit in seconds of one answer; a later one is useless on a live screen.
TIMEOUT = 5.0
# Constants of Linux: clock ticks per second in /proc/PID/stat, and bytes per page of memory.
TICKS, PAGE = 100.0, 4096
MIB = 1 << 20


@dataclass(frozen=True)
class DeviceUsage:
    """The use of one device; on CPUs, of one rank."""

    used: int
    """Bytes."""
    total: int
    busy: float | None = None
    """The share of the time in which it is busy; for a rank on CPUs, the number of busy cores."""


@dataclass
class UsageMeter:
    """Queries nodes repeatedly; CPU time is counted since the previous answer."""

    _ticks: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def usage(
        self, nodes: Sequence[Node], ranks: Sequence[RankState], connections: Connections, patience: float
    ) -> dict[int, DeviceUsage]:
        """Return the usage of each rank's device; a node that does not answer within `patience` seconds has none."""

        def ask(node: Node, link: Connection) -> dict[int, DeviceUsage]:
            return self.ask(node, link, [rank for rank in ranks if rank.node == node.name])

        answers = [outcome.get() for outcome in within(connections, nodes, ask, patience) if outcome.ok]
        return {rank: usage for answer in answers for rank, usage in answer.items()}

    def ask(self, node: Node, link: Connection, ranks: Sequence[RankState]) -> dict[int, DeviceUsage]:
        """Return the usage by rank; {} if the node has no tool that reports it."""
        if node.kind == "cuda":
            devices = gpu_usage(link.run(NVIDIA, timeout=TIMEOUT).text)
        elif node.kind == "npu":
            sibling = node.hccn_tool.rpartition("/")[0] + "/npu-smi" if node.hccn_tool else VENDOR_SMI
            tools = dict.fromkeys(("npu-smi", sibling, VENDOR_SMI))
            texts = (link.run([tool, "info"], timeout=TIMEOUT).text for tool in tools)
            devices = next((found for text in texts if (found := npu_usage(text))), {})
        else:
            return self._of_processes(node, link, ranks)
        return {rank.rank: devices[rank.device] for rank in ranks if rank.device in devices}

    def _of_processes(
        self, node: Node, link: Connection, ranks: Sequence[RankState]
    ) -> dict[int, DeviceUsage]:
        by_pid = {rank.pid: rank.rank for rank in ranks if rank.pid}
        if not by_pid:
            return {}
        files = ["/proc/meminfo", *(f"/proc/{pid}/stat" for pid in by_pid)]
        text, now = link.run(["cat", *files], timeout=TIMEOUT).text, time.monotonic()
        whole = re.search(r"^MemTotal:\s+([0-9]+) kB", text, re.MULTILINE)
        total = int(whole[1]) * 1024 if whole else 0
        found = {}
        for pid, (ticks, used) in process_usage(text).items():
            if pid in by_pid:
                rank = by_pid[pid]
                before = self._ticks.get((node.name, pid))
                self._ticks[node.name, pid] = ticks, now
                busy = (ticks - before[0]) / TICKS / (now - before[1]) if before and now > before[1] else None
                found[rank] = DeviceUsage(used, total, busy)
        return found


def gpu_usage(text: str) -> dict[int, DeviceUsage]:
    """Return the usage by device that nvidia-smi prints."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    numbers = [[int(cell) for cell in row] for row in rows if len(row) == 4 and all(map(_is_number, row))]
    return {row[0]: DeviceUsage(row[1] * MIB, row[2] * MIB, row[3] / 100) for row in numbers}


def npu_usage(text: str) -> dict[int, DeviceUsage]:
    """Return the usage by device that `npu-smi info` prints: two lines for each chip, the last pair is the memory."""
    found: dict[int, DeviceUsage] = {}
    card: int | None = None
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not cells[0] or not _is_number(cells[0][0]):
            continue
        if len(cells[0]) > 1 and not _is_number(cells[0][1]):
            card = int(cells[0][0])
            continue
        pairs = re.findall(r"([0-9]+)\s*/\s*([0-9]+)", " ".join(cells[2]))
        if card is not None and pairs and cells[2]:
            device = int(cells[0][1]) if len(cells[0]) > 1 else card
            busy = int(cells[2][0]) / 100 if _is_number(cells[2][0]) else None
            used, total = max(pairs, key=lambda pair: int(pair[1]))
            found[device] = DeviceUsage(int(used) * MIB, int(total) * MIB, busy)
            card = None
    return found


def process_usage(text: str) -> Mapping[int, tuple[float, int]]:
    """Return by pid the ticks of CPU time and the bytes of memory in lines of /proc/PID/stat."""
    found = {}
    for match in re.finditer(r"^([0-9]+) \(.*\) ([A-Za-z] .*)$", text, re.MULTILINE):
        fields = match[2].split()
        if len(fields) > 21:
            found[int(match[1])] = float(fields[11]) + float(fields[12]), int(fields[21]) * PAGE
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
