"""Measure building, merging, checking, reading and writing rank tables, and how the time grows with the size.

    python -m bench.cli.ranktable [--servers 500 2000 10000] [--repeat 3] [--json]

Each server has eight devices. A row is the best of the repeats, in a process of its own that also reports its peak
memory. `merge` reads one file per server from disk, as `ranktable merge` does, and renders the whole table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.field import Option, aligned, read_options, run
from clusterctl.inventory.cluster import Node
from clusterctl.ranktable import api
from clusterctl.ranktable.table import DeviceAddress

DEVICES = 8
# The limit in seconds for build, merge and check.
LIMITS = {2000: 0.5, 10_000: 2.0}
LIMIT_MB = 500
WORK = ("build", "merge", "check", "load", "render", "halves")


def entries(servers: int) -> list[tuple[Node, list[DeviceAddress]]]:
    """Return nodes, each with the addresses of its devices."""
    made = []
    for number in range(servers):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        node = Node(f"node{number}", host=address, address=address, kind="npu", server_id=address)
        third = f"{number >> 8}.{number & 255}"
        made.append((node, [DeviceAddress(device, f"192.{device}.{third}") for device in range(DEVICES)]))
    return made


def task(kind: str, servers: int, folder: Path) -> Callable[[], object]:
    """Prepare the inputs of one kind of work and return the function to time."""
    nodes = entries(servers)
    if kind == "build":
        return lambda: api.build(nodes).render()
    if kind == "merge":
        paths = []
        for number, entry in enumerate(nodes):
            paths.append(folder / f"{number}.json")
            paths[-1].write_text(api.build([entry]).render())
        return lambda: api.merge(api.load_all(paths)).render()
    if kind == "halves":
        parts = [(f"{at}", api.build(nodes[at::2])) for at in range(2)]
        return lambda: api.merge(parts)
    table = api.build(nodes)
    text = table.render()
    if kind == "check":
        return lambda: api.check(text)
    return (lambda: api.parse(text)) if kind == "load" else table.render


def measure(kind: str, servers: int, repeat: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        work = task(kind, servers, Path(folder))
        times = []
        for _ in range(repeat):
            began, busy = time.perf_counter(), time.process_time()
            work()
            times.append((time.perf_counter() - began, time.process_time() - busy))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds, cpu = min(times)
    return {"what": kind, "servers": servers, "seconds": seconds, "cpu": cpu, "mb": memory}


def main() -> int:
    options = read_options(
        __doc__, servers=(500, 2000, 10_000), repeat=3, json=False, one=Option(str, argparse.SUPPRESS)
    )
    if options.one:
        print(json.dumps(measure(options.one, options.servers[0], options.repeat)))
        return 0
    rows = [row for kind in WORK for row in grown(kind, options.servers, options.repeat)]
    if options.json:
        print(json.dumps(rows))
    else:
        show(rows)
        load, cores = os.getloadavg()[0], os.cpu_count()
        print(
            f"load {load:.1f} on {cores} cores" + (": too busy for a verdict" if load > (cores or 1) else "")
        )
    return int(any(row["over"] for row in rows))


def grown(kind: str, sizes: list[int], repeat: int) -> list[dict[str, object]]:
    """Measure one kind of work at each size; `over` marks rows that exceed a limit."""
    rows = []
    for servers in sizes:
        argv = [sys.executable, "-m", "bench.cli.ranktable", "--one", kind, "--servers", str(servers)]
        row = json.loads(run([*argv, "--repeat", str(repeat)], timeout=300).output)
        row["over"] = row["seconds"] > LIMITS.get(servers, float("inf")) or row["mb"] > LIMIT_MB
        rows.append(row)
    return rows


def show(rows: list[dict[str, object]]) -> None:
    lines: list[tuple[object, ...]] = [("work", "servers", "ranks", "seconds", "cpu", "us/rank", "MB", "")]
    for row in rows:
        servers, seconds, cpu, mb = (float(str(row[key])) for key in ("servers", "seconds", "cpu", "mb"))
        ranks = servers * DEVICES
        figures = (f"{seconds:.3f}", f"{cpu:.3f}", f"{seconds / ranks * 1e6:.2f}", f"{mb:.0f}")
        lines.append((row["what"], f"{servers:.0f}", f"{ranks:.0f}", *figures, "over" if row["over"] else ""))
    print(aligned(lines))


if __name__ == "__main__":
    raise SystemExit(main())
