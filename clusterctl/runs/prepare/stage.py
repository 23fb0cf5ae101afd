"""Push code and data to the nodes of a run, once for all attempts; compare data that is on the nodes already."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl import extras
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Cluster
from clusterctl.jobs.job import Job
from clusterctl.text import plural, size
from clusterctl.transfer import push
from clusterctl.transport.answers import FolderFingerprint
from clusterctl.transport.fanout import on_all

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.transfer.push import Manifest
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections


Tell = Callable[[str, str], None]
"""Called with the name of each phase of a start, and its result."""


@dataclass(frozen=True)
class Stored:
    """The folders on each node, by its name, with the code and data that were pushed for a run."""

    code: dict[str, str] = field(hash=False)
    data: dict[str, str] = field(hash=False)


def trainer_code() -> tuple[Path, Manifest]:
    """Return the folder and the manifest of the trainer and its native ops, as they are installed here."""
    import importlib.util

    spec = importlib.util.find_spec("trainer")
    if spec is None or spec.origin is None:
        raise UsageError("the embedded trainer is not installed here", extras.command("train"))
    root = Path(spec.origin).parent.parent
    # Include the compiled library, which git ignores.
    only = ("trainer", "native", "clusterctl/__init__.py", "clusterctl/wire")
    return root, push.make_manifest(root, only=only, everything=True)


Code = tuple[Path, "Manifest"] | None
"""The folder with the program of a job, and its manifest; None if the nodes have it."""


def push_code(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    tell: Tell,
    runs: Path | None = None,
    found: Callable[[], Code] | None = None,
) -> dict[str, str]:
    """Push the program; return its folder by node. `found` returns the program, if it was looked for before.

    The folder of runs is left out: its logs and checkpoints are large, and change with each run.
    """
    code = found() if found else code_of(job, runs)
    return _push(cluster, connections, *code, "code", tell) if code else {}


def code_of(job: Job, runs: Path | None) -> Code:
    """Return the folder with the program of a job, and its manifest; None if the nodes have it."""
    if job.train is not None or job.trainer:
        return trainer_code()
    return (job.code, push.make_manifest(job.code, without=runs)) if job.code is not None else None


def code_hash(job: Job, runs: Path | None) -> str:
    """Return the hash under which the nodes store the program of a job; "" if its start pushes none."""
    code = code_of(job, runs)
    return code[1].id if code else ""


def pushes(job: Job, runs: Path | None) -> Iterator[tuple[str, Path, Manifest]]:
    """Yield what the start of a job pushes to each node: its name, folder and manifest."""
    if code := code_of(job, runs):
        yield "code", *code
    if job.data is not None:
        yield "data", job.data, push.make_manifest(job.data, everything=True)


def push_data(cluster: Cluster, job: Job, connections: Connections, tell: Tell) -> dict[str, str]:
    """Push the data, or compare the data that the nodes have; return its folder by node."""
    if job.data_there:
        return compare_data(cluster, job.data_there, connections, tell)
    if job.data_store:
        return fetch_stored(cluster, job, connections, tell)
    if job.data is None:
        return {}
    return _push(cluster, connections, job.data, push.make_manifest(job.data, everything=True), "data", tell)


def fetch_stored(cluster: Cluster, job: Job, connections: Connections, tell: Tell) -> dict[str, str]:
    """Let each node fetch the data from an object store; return its folder by node."""
    from clusterctl.storage.data import fetch_data

    began = time.monotonic()
    done = fetch_data(job.data_store, job.storage, cluster.nodes, connections)
    subject = (
        f"{plural(done.files, 'file')}, {size(done.size)}, from {job.data_store}; {size(done.moved)} fetched"
    )
    if not done.is_listed and len(cluster.nodes) > 1:
        # The store has no list of hashes: check at least that all nodes have the same files.
        compare_data(cluster, next(iter(done.folders.values())), connections, tell, done.folders)
    tell("data", f"{subject} in {time.monotonic() - began:.1f} s")
    return done.folders


def stage_again(cluster: Cluster, job: Job, connections: Connections, stored: Stored, tell: Tell) -> None:
    """Push or fetch code and data again that nodes have lost, if the files on this machine and in the store have not
    changed since the run began."""
    for kind, paths in (("code", stored.code), ("data", stored.data)):
        known = [node for node in cluster.nodes if node.name in paths]
        if kind == "data" and job.data_there:
            continue
        answers = on_all(connections, known, _lost(paths))
        lost = [node for node in known if answers[node.name]]
        if not lost:
            continue
        part = replace(cluster, nodes=tuple(lost))
        again = (push_code if kind == "code" else push_data)(part, job, connections, tell)
        wrong = [node.name for node in lost if again.get(node.name) != paths[node.name]]
        if wrong:
            problem = f"{nodeset.fold(wrong)}: the run's {kind} is gone from {paths[wrong[0]]}, and it has changed here"
            raise WorkFailed(problem, "launch the job again: that pushes it again")


def _lost(paths: dict[str, str]) -> Callable[[Node, Connection], bool]:
    return lambda node, link: link.directory(paths[node.name]).missing


def _push(
    cluster: Cluster, connections: Connections, root: Path, manifest: Manifest, kind: str, tell: Tell
) -> dict[str, str]:
    from clusterctl.transfer.relay import relay_for

    for warning in manifest.warnings:
        tell("warning", warning)
    began = time.monotonic()
    source = push.Source(root, manifest)
    with relay_for("auto", cluster.nodes) as relay:
        stored = on_all(
            connections,
            cluster.nodes,
            lambda node, link: push.push_store(link, source, kind, relay=relay),
        )
    new = sum(not result.unchanged for result in stored.values())
    seconds = time.monotonic() - began
    subject = f"{plural(len(manifest.files), 'file')}, {size(manifest.size)}"
    nodes = plural(len(stored), "node")
    done = f"to {new} of {nodes} in {seconds:.1f} s" if new else f"already on {nodes}"
    tell(f"push {kind}", f"{subject} {done}")
    return {name: result.path for name, result in stored.items()}


# Limit of faults that are shown; all are counted.
SHOWN = 20
HINT = "bring the same data to every node: clusterctl push --nodes SET FOLDER PATH; clusterctl data verify checks more"


def compare_data(
    cluster: Cluster,
    folder: str,
    connections: Connections,
    tell: Tell,
    folders: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the folder by node; raise an error that names each node and file that is missing, cut or different.

    `folders` names each node's own folder, where they differ.
    """
    began = time.monotonic()
    own = folders or dict.fromkeys(cluster.names, folder)
    answers = on_all(
        connections,
        cluster.nodes,
        lambda node, link: link.ask(FolderFingerprint, "fingerprint_folder", {"path": own[node.name]}),
    )
    faults = faults_of(folder, answers)
    if faults:
        more = [f"... and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise WorkFailed("\n".join(["nothing was started:", *faults[:SHOWN], *more]), HINT)
    first = next(iter(answers.values()))
    total = sum(first.sizes.values())
    subject = f"{plural(len(first.sizes), 'file')}, {size(total)}, whole and alike on {plural(len(answers), 'node')}"
    tell("data", f"{folder}: {subject} ({time.monotonic() - began:.1f} s)")
    return {name: answer.path for name, answer in answers.items()}


def faults_of(folder: str, answers: Mapping[str, FolderFingerprint]) -> list[str]:
    """Return each fault with the nodes that have it; of each file, the most common copy counts as right."""
    nodes_of: dict[str, list[str]] = {}

    def note(node: str, fault: str) -> None:
        nodes_of.setdefault(fault, []).append(node)

    names = sorted({name for answer in answers.values() for name in answer.sizes})
    for node, answer in answers.items():
        if answer.missing:
            note(node, f"{folder}: no such folder")
        elif not answer.sizes:
            note(node, f"{folder}: is empty")
        for fault in answer.faults:
            note(node, f"{folder}/{fault}")
    present = {node: answer for node, answer in answers.items() if answer.sizes}
    for name in names:
        copies = {
            node: (answer.sizes[name], answer.hashes.get(name))
            for node, answer in present.items()
            if name in answer.sizes
        }
        counts = Counter(copies.values())
        right = max(counts, key=lambda copy: counts[copy])
        for node in present:
            if node not in copies:
                note(node, f"{folder}/{name}: is missing")
            elif copies[node][0] != right[0]:
                note(node, f"{folder}/{name}: has {copies[node][0]} bytes, on others {right[0]}")
            elif copies[node] != right:
                note(node, f"{folder}/{name}: differs from the other nodes'")
    return [f"{nodeset.fold(nodes)}: {fault}" for fault, nodes in nodes_of.items()]
