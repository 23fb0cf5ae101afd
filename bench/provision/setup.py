"""Compare `nodes setup` with pip on each node: `python -m bench.provision.setup [--nodes 32] [--megabytes 30]`.

The nodes are OpenSSH daemons on loopback addresses. The alternative is a shell loop over 8 nodes at a time: `scp` of
the wheels to each node, then `ssh NODE python3 -m venv ENV`, and there pip with the same options. The wheels are made
by this program: one of the given size, eight small ones, and the pip that comes with this Python.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.field import Option, read_options, run, sandbox, spread, timed
from clusterctl.inventory.cluster import Cluster, Node, load

AT_ONCE = 8


def main() -> int:
    options = read_options(
        __doc__,
        nodes=32,
        megabytes=Option(30, "of the large wheel"),
        runs=Option(5, "of setups that change nothing"),
    )
    with sandbox("setup", options.nodes) as (made, folder):
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        wheels = make_wheels(folder / "wheels", options.megabytes)
        measure(load(made.cluster_file), made.cluster_file, wheels, options.runs)
    return 0


def measure(nodes: Cluster, file: Path, wheels: Path, runs: int) -> None:
    """Print a row for each step of both alternatives."""
    ours = [sys.executable, "-m", "clusterctl", "nodes", "setup", "-c", str(file), "--env", "~/own"]
    setup = [*ours, "--wheelhouse", str(wheels)]
    first = run(setup, stderr=subprocess.STDOUT)
    pushed = next((line for line in first.output.splitlines() if line.startswith("push")), "")
    again = [run(setup).wall for _ in range(runs)]
    print(f"nodes setup, {len(nodes.nodes)} nodes: {first.wall:.1f} s ({pushed})")
    print(f"nodes setup, nothing changed: {spread(again)}")
    copied = timed(lambda: each(nodes, lambda node: scp(nodes, node, wheels)))
    print(f"scp of the wheels to each node: {copied:.1f} s")
    line = (
        "cd ~ && {python} -m venv env && env/bin/pip install -q --no-index --find-links wheels --no-cache-dir"
    )
    line += " --disable-pip-version-check --require-hashes -r wheels/requirements.lock"
    commands = {node.name: line.format(python=sys.executable) for node in nodes.nodes}
    installed = timed(lambda: each(nodes, lambda node: ssh(nodes, node, commands[node.name])))
    print(f"venv and pip on each node: {installed:.1f} s")
    repeated = timed(
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


def each(nodes: Cluster, work: Callable[[Node], object]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(work, nodes.nodes))


def options_of(nodes: Cluster, node: Node) -> list[str]:
    return ["-q", "-i", str(node.key), "-o", f"UserKnownHostsFile={nodes.known_hosts}", "-o", "BatchMode=yes"]


def scp(nodes: Cluster, node: Node, source: Path) -> None:
    target = f"{node.user}@{node.host}:wheels"
    run(["scp", *options_of(nodes, node), "-P", str(node.port), "-r", str(source), target])


def ssh(nodes: Cluster, node: Node, line: str) -> None:
    run(["ssh", *options_of(nodes, node), "-p", str(node.port), f"{node.user}@{node.host}", line])


if __name__ == "__main__":
    sys.exit(main())
