"""What a run needs on its nodes beside its processes: code and data, pushed once, found again by each attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.inventory import Cluster
from clusterctl.job import Job
from clusterctl.outcomes import on_all
from clusterctl.words import size, some

if TYPE_CHECKING:
    from clusterctl.push import Manifest
    from clusterctl.transport import Connections

Tell = Callable[[str, str], None]
"""What waits is told of each phase: its name, and what came of it."""


@dataclass(frozen=True)
class Stored:
    """Where each node keeps what was pushed for a run."""

    code: dict[str, str] = field(hash=False)
    data: dict[str, str] = field(hash=False)


def trainer_code() -> tuple[Path, Manifest]:
    """The embedded trainer and its fused ops as they are installed here, to be pushed."""
    import importlib.util

    from clusterctl import push

    spec = importlib.util.find_spec("trainer")
    if spec is None or spec.origin is None:
        raise UsageError("the embedded trainer is not installed here", "pip install 'clusterctl[train]'")
    root = Path(spec.origin).parent.parent
    return root, push.make_manifest(
        root, only=("trainer", "native"), everything=True
    )  # the compiled op too, which git ignores


def push_code(
    cluster: Cluster, job: Job, connections: Connections, tell: Tell, runs: Path | None = None
) -> dict[str, str]:
    """The program, without the folder of runs: it would travel with all logs and checkpoints, and be another one
    after each run."""
    from clusterctl import push

    if job.train is not None:
        root, manifest = trainer_code()
    elif job.code is not None:
        root, manifest = job.code, push.make_manifest(job.code, without=runs)
    else:
        return {}
    return _push(cluster, connections, root, manifest, "code", tell)


def push_data(cluster: Cluster, job: Job, connections: Connections, tell: Tell) -> dict[str, str]:
    from clusterctl import push

    if job.data_there:
        from clusterctl.data_there import check_there

        return check_there(cluster, job.data_there, connections, tell)
    if job.data is None:
        return {}
    return _push(cluster, connections, job.data, push.make_manifest(job.data, everything=True), "data", tell)


def _push(
    cluster: Cluster, connections: Connections, root: Path, manifest: Manifest, kind: str, tell: Tell
) -> dict[str, str]:
    from clusterctl import push
    from clusterctl.relay import relay_for

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
    new = sum(not one.unchanged for one in stored.values())
    seconds = time.monotonic() - began
    what = f"{some(len(manifest.files), 'file')}, {size(manifest.size)}"
    tell(f"push {kind}", f"{what} to {new} of {some(len(stored), 'node')} in {seconds:.1f} s")
    return {name: one.path for name, one in stored.items()}
