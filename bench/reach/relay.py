"""Measure the cost of a relayed push per node: `python -m bench.reach.relay [--nodes 6] [--megabytes 200] [--runs 3]`.

The agents run on this machine, one per node, in a chain over loopback; the files are in memory. The figures are
processor time, because the nodes share the machine's cores: of the first node, which receives from the launcher, and of
a node that receives from another node. The last line shows how much of it is hashing, at the speed of the nodes'
Python.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench.field import Option, cpu_of, read_options
from clusterctl.inventory.cluster import Node
from clusterctl.transfer.push import Source, make_manifest, push_tree
from clusterctl.transfer.relay import relay_for
from clusterctl.transport.connection import Connection
from clusterctl.transport.local import LocalTransport

MEMORY = Path("/dev/shm")
SPEED = """
import hashlib, os, time
data, began = os.urandom(256 << 10), time.process_time()
for _ in range(400):
    hashlib.sha256(data)
print((400 << 18) / 1e6 / (time.process_time() - began))
"""


def main() -> int:
    options = read_options(
        __doc__,
        nodes=6,
        megabytes=Option(200, "of the one file"),
        runs=3,
        python=Option("/usr/bin/python3", "the nodes' own"),
    )
    if options.nodes < 2:
        sys.exit("a relay needs two nodes")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        root = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        (root / "source").mkdir()
        with (root / "source" / "data").open("wb") as file:
            for _ in range(options.megabytes):
                file.write(os.urandom(1_000_000))
        source = Source(root / "source", make_manifest(root / "source"))
        for how in ("plain", "on"):
            costs = [cost(root, source, how, options.nodes, options.python) for _ in range(options.runs)]
            first, other = (statistics.median(times) * 1000 for times in zip(*costs, strict=True))
            print(
                f"--relay {how}: first node {first:.0f} ms, each other {other:.0f} ms, {options.megabytes} MB"
            )
    speed = float(subprocess.run([options.python, "-c", SPEED], capture_output=True, check=True).stdout)
    print(f"a node's sha256: {speed:.0f} MB/s, {options.megabytes / speed * 1000:.0f} ms of it")
    return 0


def cost(root: Path, source: Source, how: str, count: int, python: str) -> tuple[float, float]:
    """Return the CPU seconds of the first node and of the median other node, without the agents' start."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        places = [Path(folder) / f"node{number}" for number in range(count)]
        nodes = [node_at(home, python) for home in places]
        links = [LocalTransport(home=home).connect(node) for home, node in zip(places, nodes, strict=True)]
        try:
            pids = [int(link.hello().pid) for link in links]
            before = [cpu_of(pid) for pid in pids]
            with relay_for(how, nodes) as relay:
                started = threading.Event()

                def push_to(home: Path, link: Connection) -> None:
                    try:
                        push_tree(
                            link, source, str(home / "dest"), relay=relay, progress=lambda *_: started.set()
                        )
                    finally:
                        started.set()

                threads = [
                    threading.Thread(target=push_to, args=pair) for pair in zip(places, links, strict=True)
                ]
                threads[0].start()
                # Wait until it has started, so that the first node is the first of the chain.
                started.wait()
                for thread in threads[1:]:
                    thread.start()
                for thread in threads:
                    thread.join()
            times = [cpu_of(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        finally:
            for link in links:
                link.close()
        copies = [home / "dest" / "data" for home in places]
        if any(not copy.is_file() or copy.stat().st_size != source.manifest.size for copy in copies):
            raise SystemExit("a node does not have all bytes")
    return times[0], statistics.median(times[1:])


def node_at(home: Path, python: str) -> Node:
    home.mkdir()
    return Node(name=home.name, host="local", address="127.0.0.1", python=python, workdir=str(home / "work"))


if __name__ == "__main__":
    sys.exit(main())
