"""What a run's folder keeps of how it was started: enough for another process to find it, and to start it again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from clusterctl.files import replace_file
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.jobs.plan import Plan
from clusterctl.jobs.restarts import Restart
from clusterctl.jobs.run_folder import RunDir

# Of a job: the lines of its file.
NOT_KEPT = ("document",)
# From one attempt to the next.
STAYS = (
    "created",
    "spares",
    "abandoned",
    "size",
    "metrics_base",
    "code_paths",
    "data_paths",
)


def write_run(run: RunDir, made: Plan, spares: Sequence[Node] = ()) -> None:
    """The record, the plan as it was carried out, and the texts that went to the nodes; for the owner's eyes only."""
    first = run.read_record() if run.record.exists() else {}
    stays = {
        "created": time.time(),
        "spares": [asdict(node) for node in spares],
        "abandoned": [],
        "size": len(made.cluster.nodes),
        "metrics_base": 0,
        **{name: first[name] for name in STAYS if name in first},
    }
    run.write_json(run.record, {**_record(run, made), **stays}, mode=0o600)
    run.write_json(run.plan, _without_secrets(made.as_json(), set(made.facts.forwarded)), mode=0o600)
    replace_file(run.hostfile, made.hostfile)
    if made.facts.rank_table:
        replace_file(run.rank_table, made.facts.rank_table)
    if first:
        run.write_json(run.state, {"phase": "running", "nodes": dict.fromkeys(made.cluster.names, "running")})
    run.add_event("planned", ranks=made.world_size, attempt=made.facts.attempt)


def _record(run: RunDir, made: Plan) -> dict[str, Any]:
    cluster, facts = made.cluster, made.facts
    return {
        "run": run.run_id,
        "attempt": facts.attempt,
        "job": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in _job_fields(made.job).items()
        },
        "cluster": {
            "name": cluster.name,
            "source": cluster.source,
            "known_hosts": cluster.known_hosts,
            "nodes": [asdict(node) for node in cluster.nodes],
        },
        "code_paths": dict(facts.code_paths),
        "data_paths": dict(facts.data_paths),
        "run_dirs": {one.node.name: one.run_dir for one in made.nodes},
        "ranks": {one.node.name: [process.rank for process in one.processes] for one in made.nodes},
        "devices": {one.node.name: [process.device for process in one.processes] for one in made.nodes},
    }


def _job_fields(job: Job) -> dict[str, Any]:
    found = {one.name: getattr(job, one.name) for one in fields(Job) if one.name not in NOT_KEPT}
    return {**found, "restart": asdict(job.restart) if job.restart else None}


def _without_secrets(value: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """What was forwarded from the user's environment is not written down here."""
    for node in value["nodes"]:
        for process in node["processes"]:
            process["env"] = {name: "***" if name in names else text for name, text in process["env"].items()}
    return value


def cluster_of(run: RunDir) -> Cluster:
    """The nodes of a run as they were when it started, whatever the inventory says now."""
    record = run.read_record()["cluster"]
    nodes = tuple(Node(**_tuples(one)) for one in record["nodes"])
    return Cluster(record["name"], nodes, known_hosts=record["known_hosts"], source=record["source"])


def spares_of(run: RunDir) -> list[Node]:
    """The nodes that wait for one to be lost."""
    return [Node(**_tuples(one)) for one in run.read_record().get("spares", [])]


def size_of(run: RunDir) -> int:
    """How many nodes the run began with, and has again when it can."""
    record = run.read_record()
    return int(record.get("size") or len(record["cluster"]["nodes"]))


@dataclass(frozen=True)
class Abandoned:
    """A node that was given up with an attempt of the run on it."""

    node: Node
    run_dir: str
    attempt: int


def abandoned_of(run: RunDir) -> list[Abandoned]:
    """The nodes that were given up and have not answered since."""
    kept = run.read_record().get("abandoned", [])
    return [Abandoned(Node(**_tuples(one["node"])), one["run_dir"], one["attempt"]) for one in kept]


def job_of(run: RunDir) -> Job:
    """The job of a run as it was when it started, whatever its file says now."""
    kept = run.read_record()["job"]
    job = Job(**_tuples(kept))
    restart = Restart(**kept["restart"]) if kept.get("restart") else None
    return replace(job, code=job.code and Path(job.code), data=job.data and Path(job.data), restart=restart)


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples; the values of Node and Job know no lists at their top."""
    return {key: tuple(one) if isinstance(one, list) else one for key, one in value.items()}
