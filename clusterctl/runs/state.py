"""The state of a run, as its nodes report it and as its folder keeps it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clusterctl.errors import LinkLost
from clusterctl.jobs.record import cluster_of
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.aftermath import placed, when, with_aftermath
from clusterctl.runs.stall import is_number
from clusterctl.transport.fanout import Outcome, within

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.fanout import Connection, Connections


FINAL = ("finished", "failed", "stopped", "lost")


# An attempt failed and the controller waits to start the next.
RESTARTING = "restarting"


@dataclass(frozen=True)
class RunState:
    """A run as it was last seen."""

    phase: str
    nodes: dict[str, str] = field(hash=False)
    ranks: tuple[dict[str, Any], ...] = ()
    failure: dict[str, Any] | None = field(default=None, hash=False)
    """The first failure: node, rank, exit code or signal."""
    step: dict[str, Any] | None = field(default=None, hash=False)
    """The last step's metrics."""
    unreachable: dict[str, str] = field(default_factory=dict, hash=False)
    controller: int | None = None
    """The pid of the process on this machine that brings the run home and decides on restarts; None: nobody does."""
    verdict: str = ""
    """What was decided after the last failure, and why."""
    orphaned: tuple[str, ...] = ()
    """Nodes that answer, and whose supervisor is dead."""

    @property
    def is_final(self) -> bool:
        return self.phase in FINAL


def current_state(run: RunDir, connections: Connections) -> RunState:
    """The run as its nodes say now; where they can't be asked, as it was seen last."""
    controller = run.controller()
    state, last = query_nodes(run, connections), run.read_state()
    if state.phase == "unknown" and last.get("phase") in FINAL:
        return replace(state_from_json(last), unreachable=state.unreachable)
    state = replace(state, controller=controller, verdict=last.get("verdict", ""))
    # It writes the end itself, after the last byte; between two attempts none runs.
    if controller is not None:
        return replace(state, phase=RESTARTING) if last.get("phase") == RESTARTING else state
    if not state.unreachable:
        run.write_json(run.state, asdict(state))
    return state


def query_nodes(
    run: RunDir, connections: Connections, gone: Collection[str] = (), patience: float | None = None
) -> RunState:
    """What the nodes say of the present attempt, within `patience` seconds; those that are `gone` are not asked."""
    record, nodes = run.read_record(), cluster_of(run).nodes

    def asked(node: Node, link: Connection) -> dict[str, Any]:
        where = {"run_dir": record["run_dirs"][node.name], "attempt": record["attempt"]}
        return with_aftermath(link, link.call("state", where))

    outcomes = within(connections, [node for node in nodes if node.name not in gone], asked, patience)
    outcomes += [Outcome(node, error=LinkLost(node.name, "lost")) for node in nodes if node.name in gone]
    return read_answers(record, outcomes, _last_step(run))


def state_from_json(value: dict[str, Any]) -> RunState:
    """A state that a run's folder keeps."""
    lists = {name: tuple(value.get(name, ())) for name in ("ranks", "orphaned")}
    return RunState(**{**value, **lists})


def read_answers(
    record: dict[str, Any], outcomes: Sequence[Outcome[Any]], step: dict[str, Any] | None
) -> RunState:
    """One state out of what the nodes answered."""
    nodes: dict[str, str] = {}
    ranks: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    unreachable: dict[str, str] = {}
    orphaned: list[str] = []
    for outcome in outcomes:
        name = outcome.node.name
        if outcome.error is not None:
            unreachable[name] = getattr(outcome.error, "reason", str(outcome.error))
            nodes[name] = "unknown"
            continue
        answer = outcome.get()
        nodes[name] = (answer["node"] or {"state": "unknown"})["state"]
        if nodes[name] == "lost" or (answer["node"] or {}).get("supervisor_lost"):
            orphaned.append(name)
        devices = dict(zip(record["ranks"][name], record["devices"][name], strict=True))
        there = [placed(one, answer) for one in answer["ranks"]]
        beats, pace = answer.get("heartbeats") or {}, answer.get("pace") or {}
        failure = (answer["node"] or {}).get("first_failure") or {}
        hang = {key: failure[key] for key in ("hang", "silent", "stopped") if key in failure}
        ranks += [
            {
                **one,
                **(hang if one["rank"] == failure.get("rank") else {}),
                "node": name,
                "device": devices.get(one["rank"]),
                **beat_of(beats.get(str(one["rank"]))),
                **pace_of(pace.get(str(one["rank"]))),
            }
            for one in there
        ]
        if failure:
            whole = next((one for one in there if one["rank"] == failure["rank"]), {})
            failures.append({**whole, **failure, "node": name, "device": devices.get(failure["rank"])})
    phase, first = _phase(list(nodes.values())), first_failure(failures)
    return RunState(phase, nodes, tuple(ranks), first, step, unreachable, orphaned=tuple(orphaned))


def beat_of(said: dict[str, Any] | None) -> dict[str, Any]:
    """The step that a rank's trainer finished last, and its age by the node's clock; nothing of a bare command."""
    word = next(iter(str((said or {}).get("text")).split()), "")
    return {"step": int(word), "step_age": (said or {})["age"]} if word.isdecimal() else {}


def pace_of(seconds: object) -> dict[str, Any]:
    """What a rank itself takes for a step, where its node has measured it."""
    return {"step_seconds": seconds} if is_number(seconds) else {}


def _phase(states: Sequence[str]) -> str:
    """The run's phase out of its nodes': the worst end counts, and running as long as one still runs."""
    for phase in ("unknown", "running", "lost", "failed", "stopped"):
        if phase in states:
            return phase
    return "finished"


def first_failure(failures: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The earliest of the nodes' own first failures, by their steady clocks; what a node was asked to stop is none."""
    return min(failures, key=when, default=None)


def _last_step(run: RunDir) -> dict[str, Any] | None:
    step = None
    for metric in run.metric_lines():
        if metric.get("event") == "step":
            step = metric
    return step
