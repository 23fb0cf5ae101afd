"""Compare `push --image` with copying the archive: `python -m bench.provision.image [--nodes 16] [--megabytes 200]`.

The nodes are OpenSSH daemons on loopback addresses. The alternative is a shell loop over 8 nodes at a time: `scp` of
the archive to each node, then the runtime's `load` on the node. The runtime is the tests' stand-in, which unpacks
nothing, so only the transport of the archive is measured. Both alternatives take turns.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import sys
import tarfile
from pathlib import Path

from bench.field import sandbox
from bench.provision.setup import each, run, scp, ssh, timed
from clusterctl.inventory.cluster import Cluster, load
from clusterctl.transfer.image import MACHINES
from tests.support import runtime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16, help="16")
    parser.add_argument("--megabytes", type=int, default=200, help="200")
    parser.add_argument("--runs", type=int, default=3, help="3")
    options = parser.parse_args()
    with sandbox("image", options.nodes) as (made, folder):
        program = folder / "docker"
        text = Path(runtime.__file__).read_text(encoding="utf-8")
        program.write_text(text.replace("/usr/bin/env python3", sys.executable))
        program.chmod(0o755)
        archive = write_archive(folder / "fresh.tar", options.megabytes)
        measure(load(made.cluster_file), made.cluster_file, archive, program, options.runs)
    return 0


def measure(nodes: Cluster, file: Path, archive: Path, program: Path, runs: int) -> None:
    """Print the seconds of both alternatives."""
    ours = [sys.executable, "-m", "clusterctl", "push", "-c", str(file), "--image", str(archive)]
    words = [*ours, "--runtime", str(program), "-n", "all"]
    rows: dict[str, list[float]] = {"push --image": [], "scp and load on each node": []}

    def copied() -> str:
        each(nodes, lambda node: scp(nodes, node, archive))
        return each(nodes, lambda node: ssh(nodes, node, f"{program} load --input=wheels && rm wheels"))

    for _ in range(runs):
        for name, work in zip(rows, (lambda: run(words), copied), strict=True):
            shutil.rmtree(program.parent / "images", ignore_errors=True)
            (program.parent / "images").mkdir()
            rows[name].append(timed(work)[0])
    for name, seconds in rows.items():
        print(
            f"{name}, {len(nodes.nodes)} nodes: {statistics.median(seconds):.1f} s"
            f" ({min(seconds):.1f} to {max(seconds):.1f})"
        )


def write_archive(path: Path, megabytes: int) -> Path:
    """Write an archive in docker's format with one layer of random bytes."""
    machine = os.uname().machine
    architecture = next((name for name, found in MACHINES.items() if found == machine), machine)
    entry = [{"Config": "abc.json", "RepoTags": ["team/fresh:3"], "Layers": ["layer.tar"]}]
    members = {
        "abc.json": json.dumps({"architecture": architecture}).encode(),
        "manifest.json": json.dumps(entry).encode(),
        "layer.tar": os.urandom(megabytes * 1_000_000),
    }
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


if __name__ == "__main__":
    sys.exit(main())
