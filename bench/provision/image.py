"""Compare `push --image` with copying the archive: `python -m bench.provision.image [--nodes 16] [--megabytes 200]`.

The nodes are OpenSSH daemons on loopback addresses. The alternative is a shell loop over 8 nodes at a time: `scp` of
the archive to each node, then the runtime's `load` on the node. The runtime is the tests' stand-in, which unpacks
nothing, so only the transport of the archive is measured. Both alternatives take turns.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from bench.field import in_turn, read_options, run, sandbox, spread, timed
from bench.provision.setup import each, scp, ssh
from clusterctl.inventory.cluster import Cluster, load
from clusterctl.transfer.image import MACHINES
from tests.support import runtime


def main() -> int:
    options = read_options(__doc__, nodes=16, megabytes=200, runs=3)
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

    def pushed() -> None:
        run(words)

    def copied() -> None:
        each(nodes, lambda node: scp(nodes, node, archive))
        each(nodes, lambda node: ssh(nodes, node, f"{program} load --input=wheels && rm wheels"))

    def alone(work: Callable[[], None]) -> float:
        shutil.rmtree(program.parent / "images", ignore_errors=True)
        (program.parent / "images").mkdir()
        return timed(work)

    ways = {"push --image": pushed, "scp and load on each node": copied}
    for name, seconds in in_turn(
        {name: lambda w=work: alone(w) for name, work in ways.items()}, runs
    ).items():
        print(f"{name}, {len(nodes.nodes)} nodes: {spread(seconds, '.1f')} s")


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
