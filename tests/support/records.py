"""Records and states of runs, made from a few values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT, RunRecord
from clusterctl.runs.state import NodeAnswer, RankState, RunState
from clusterctl.transport.fanout import Outcome
from clusterctl.wire.typed_json import decode


def record_of(
    ranks: Mapping[str, Sequence[int]],
    devices: Mapping[str, Sequence[int]] | None = None,
    job: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunRecord:
    """Return a record of a run with these ranks on each node."""
    nodes = tuple(Node(name, name, name) for name in ranks)
    record = RunRecord(
        run="r",
        attempt=1,
        job=Job("r", **(job or {})),
        cluster=Cluster("c", nodes),
        run_dirs={name: f"/nodes/{name}/r" for name in ranks},
        ranks={name: tuple(numbers) for name, numbers in ranks.items()},
        devices={name: tuple(numbers) for name, numbers in (devices or ranks).items()},
        format=FORMAT,
    )
    return replace(record, **more)


def rank_of(value: Mapping[str, Any]) -> RankState:
    """Return the state of a rank from JSON."""
    return decode(RankState, dict(value))


def state_of(
    nodes: Mapping[str, str],
    ranks: Sequence[RankState] = (),
    failure: RankState | None = None,
    phase: str | None = None,
    **more: Any,
) -> RunState:
    """Return a state of a run; its phase is that of its nodes unless given."""
    phases = {name: Phase(value) for name, value in nodes.items()}
    whole = Phase(phase) if phase else Phase.of_nodes(phases.values())
    return RunState(whole, phases, tuple(ranks), failure, **more)


def outcome(name: str, answer: Any) -> Outcome[Any]:
    """Return what came of asking a node: an answer in JSON, or an error."""
    node = Node(name, name, name)
    if isinstance(answer, Exception):
        return Outcome(node, error=answer)  # type: ignore[arg-type]
    return Outcome(node, decode(NodeAnswer, answer))
