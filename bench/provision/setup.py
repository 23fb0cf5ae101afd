"""Compare `nodes setup` with pip on each node: `python -m bench.provision.setup [--nodes 32] [--megabytes 30]`.

The nodes are OpenSSH daemons on loopback addresses. The alternative is a shell loop over 8 nodes at a time: `scp` of
the wheels to each node, then `ssh NODE python3 -m venv ENV`, and there pip with the same options. The wheels are made
by this program: one of the given size, eight small ones, and the pip that comes with this Python.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.field import sandbox
from clusterctl.inventory.cluster import Cluster, Node, load

AT_ONCE = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=32, help="32")
    parser.add_argument("--megabytes", type=int, default=30, help="of the large wheel; 30")
    parser.add_argument("--runs", type=int, default=5, help="of setups that change nothing; 5")
    options = parser.parse_args()
    with sandbox("setup", options.nodes) as (made, folder):
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        wheels = make_wheels(folder / "wheels", options.megabytes)
        measure(load(made.cluster_file), made.cluster_file, wheels, options.runs)
    return 0


def measure(nodes: Cluster, file: Path, wheels: Path, runs: int) -> None:
    """Print a row for each step of both alternatives."""
    ours = [sys.executable, "-m", "clusterctl", "nodes", "setup", "-c", str(file), "--env", "~/own"]
    setup = [*ours, "--wheelhouse", str(wheels)]
    first, text = timed(lambda: run(setup))
    pushed = next((line for line in text.splitlines() if line.startswith("push")), "")
    again = [timed(lambda: run(setup))[0] for _ in range(runs)]
    print(f"nodes setup, {len(nodes.nodes)} nodes: {first:.1f} s ({pushed})")
    print(
        f"nodes setup, nothing changed: {statistics.median(again):.2f} s ({min(again):.2f} to {max(again):.2f})"
    )
    copied, _ = timed(lambda: each(nodes, lambda node: scp(nodes, node, wheels)))
    print(f"scp of the wheels to each node: {copied:.1f} s")
    line = (
        "cd ~ && {python} -m venv env && env/bin/pip install -q --no-index --find-links wheels --no-cache-dir"
    )
    line += " --disable-pip-version-check --require-hashes -r wheels/requirements.lock"
    commands = {node.name: line.format(python=sys.executable) for node in nodes.nodes}
    installed, _ = timed(lambda: each(nodes, lambda node: ssh(nodes, node, commands[node.name])))
    print(f"venv and pip on each node: {installed:.1f} s")
    repeated, _ = timed(
        lambda: each(
            nodes, lambda node: ssh(nodes, node, "cd ~ && env/bin/pip install" + line.partition("install")[2])
        )
    )
    print(f"pip on each node, nothing changed: {repeated:.1f} s")


def make_wheels(folder: Path, megabytes: int) -> Path:
    """Write generated wheels, pip's wheel, and their lock file; return the folder."""
    import ensurepip

    folder.mkdir()
    lines = []
    for name in ("large", *(f"small{number}" for number in range(8))):
        path = folder / f"{name}-1.0-py3-none-any.whl"
        content = os.urandom(megabytes * 1_000_000) if name == "large" else b"#" * 20_000
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}/data.bin", content)
            archive.writestr(f"{name}/__init__.py", "x = 1\n" * 200)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        lines.append(f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    (folder / "requirements.lock").write_text("".join(lines))
    for pip in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
        (folder / pip.name).write_bytes(pip.read_bytes())
    return folder


def each(nodes: Cluster, work: Callable[[Node], object]) -> str:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(work, nodes.nodes))
    return ""


def options_of(nodes: Cluster, node: Node) -> list[str]:
    return ["-q", "-i", str(node.key), "-o", f"UserKnownHostsFile={nodes.known_hosts}", "-o", "BatchMode=yes"]


def scp(nodes: Cluster, node: Node, source: Path) -> None:
    target = f"{node.user}@{node.host}:wheels"
    run(["scp", *options_of(nodes, node), "-P", str(node.port), "-r", str(source), target])


def ssh(nodes: Cluster, node: Node, line: str) -> None:
    run(["ssh", *options_of(nodes, node), "-p", str(node.port), f"{node.user}@{node.host}", line])


def run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:6])} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stderr


def timed(work: Callable[[], str]) -> tuple[float, str]:
    began = time.monotonic()
    text = work()
    return time.monotonic() - began, text


if __name__ == "__main__":
    sys.exit(main())
