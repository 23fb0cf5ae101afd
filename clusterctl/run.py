"""Start, watch, stop, ask: verbs over a Plan, the connections to its nodes, and the run's folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl import contract, given_up, plan
from clusterctl.aftermath import placed, when, with_aftermath
from clusterctl.errors import ClusterctlError, LinkLost, UsageError, WorkFailed
from clusterctl.inventory import Cluster, Node
from clusterctl.job import Job
from clusterctl.link import RequestFailed
from clusterctl.master_port import free_port
from clusterctl.outcomes import on_all, within
from clusterctl.outcomes import raise_failures as raise_failures
from clusterctl.record import cluster_of, job_of, write_run
from clusterctl.rundir import NodeFiles, RunDir, make_runs, new_run_id
from clusterctl.stored import Stored, Tell, push_code, push_data
from clusterctl.stragglers import is_number
from clusterctl.transport import Outcome
from clusterctl.words import some

if TYPE_CHECKING:
    from clusterctl.silence import Hang
    from clusterctl.transport import Connection, Connections

FINAL = ("finished", "failed", "stopped", "lost")
RESTARTING = "restarting"  # an attempt failed and the controller waits to start the next
SETTLE = 15.0  # seconds that `stop` gives a controller to bring the last bytes home


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


# -- start --------------------------------------------------------------------------------------------------


def launch(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    runs: Path,
    tell: Tell,
    run: RunDir | None = None,
    spares: Sequence[Node] = (),
) -> RunDir:
    """Push, write and start a run on all of its nodes, or leave none of it running; gives the run's folder.

    Spare nodes get what is pushed too: a restart then needs nothing that may have changed here since.
    """
    run = run or new_run(job, runs)
    everywhere = replace(cluster, nodes=(*cluster.nodes, *spares))
    hellos = reach(everywhere, connections, tell)
    code = push_code(everywhere, job, connections, tell, runs)
    data = push_data(everywhere, job, connections, tell)
    facts = prepare(cluster, job, connections, hellos, Stored(code, data), tell)
    made = plan.make_plan(cluster, job, replace(facts, run_id=run.run_id))
    try:
        start_all(run, made, connections, tell, spares)
    except BaseException as problem:
        _write_unstarted(run, cluster, problem)
        raise
    return run


def _write_unstarted(run: RunDir, cluster: Cluster, problem: BaseException) -> None:
    """An attempt that never began: it failed, or somebody thought better of it."""
    if not run.record.exists():
        return  # what kept it from being written is what is to be told
    phase = "failed" if isinstance(problem, Exception) else "stopped"
    run.write_json(run.state, asdict(RunState(phase, dict.fromkeys(cluster.names, "stopped"))))


def new_run(job: Job, runs: Path) -> RunDir:
    """A run's folder-to-be: known before anything starts, so that an interrupt at any moment finds it."""
    return RunDir(make_runs(runs) / new_run_id(job.name))


def resume(
    run: RunDir, connections: Connections, tell: Tell, chosen: Callable[[], Cluster] | None = None
) -> None:
    """Start an ended run's next attempt: the same nodes or those `chosen`, the same code, data and folders."""
    state = status(run, connections)
    if not state.is_final:
        hint = f"clusterctl attach {run.run_id} follows it, clusterctl stop {run.run_id} ends it"
        raise UsageError(f"{run.run_id} is {state.phase}, not ended", hint)
    run.stop_asked.unlink(missing_ok=True)
    run.add_event("resumed")
    try:
        start_next(run, chosen() if chosen else cluster_of(run), connections, tell)
    except BaseException as problem:
        _write_unstarted(run, cluster_of(run), problem)
        raise


def start_next(
    run: RunDir,
    cluster: Cluster,
    connections: Connections,
    tell: Tell,
    before: Callable[[plan.Plan], None] = lambda made: None,
) -> None:
    """Start a run's next attempt on these nodes; the rank table and the hostfile are theirs."""
    record, job = run.read_record(), job_of(run)
    hellos = reach(cluster, connections, tell)
    stored = Stored(record["code_paths"], record["data_paths"])
    _still_there(cluster, connections, stored)
    facts = prepare(cluster, job, connections, hellos, stored, tell)
    facts = replace(facts, run_id=run.run_id, attempt=record["attempt"] + 1)
    made = plan.make_plan(cluster, job, facts)
    before(made)
    start_all(run, made, connections, tell)


def reach(cluster: Cluster, connections: Connections, tell: Tell) -> dict[str, dict[str, Any]]:
    """Every node's own word on who it is."""
    hellos = on_all(connections, cluster.nodes, lambda node, link: link.hello())
    tell("reach", f"{some(len(hellos), 'node')} reached")
    _same_machine_twice(cluster, hellos)
    return hellos


def prepare(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    hellos: dict[str, dict[str, Any]],
    stored: Stored,
    tell: Tell,
) -> plan.Facts:
    """What only the nodes can say of a run that is about to start."""
    from clusterctl import ranktable_ask

    table = ""
    if plan.rank_table_wanted(job, cluster):
        asked = ranktable_ask.ask_nodes(cluster, connections, job.devices)
        table = asked.table.render()
        seen = "".join(f"; {words}" for words in (asked.detected, *asked.elsewhere) if words)
        tell("ranktable", f"built from the answers of {some(len(cluster.nodes), 'node')}{seen}")
    return plan.Facts(
        master_port=job.master_port or free_port(connections.of(cluster.nodes[0]), cluster.nodes[0]),
        workdirs={name: hello["workdir"] for name, hello in hellos.items()},
        homes={name: hello["home"] for name, hello in hellos.items()},
        cpus={name: hello["cpus"] for name, hello in hellos.items()},
        code_paths=stored.code,
        data_paths=stored.data,
        forwarded=_forwarded(job),
        rank_table=table,
    )


def start_all(
    run: RunDir, made: plan.Plan, connections: Connections, tell: Tell, spares: Sequence[Node] = ()
) -> None:
    """Write and start an attempt on all of its nodes; where one can't, or the user asked for the end, on none."""
    nodes = made.cluster.nodes
    write_run(run, made, spares)
    run.cause.unlink(missing_ok=True)
    try:
        on_all(connections, nodes, lambda node, link: _write_files(link, _node_plan(made, node), made))
        on_all(connections, nodes, lambda node, link: _start(link, _node_plan(made, node), made))
        if (
            run.stop_asked.exists()
        ):  # asked after we looked last, so the asker may have stopped the attempt before
            raise WorkFailed(f"{run.run_id} was stopped while attempt {made.facts.attempt} started")
        run.add_event("started", nodes=made.cluster.names, ranks=made.world_size, attempt=made.facts.attempt)
        what = f"{some(made.world_size, 'rank')} on {some(len(nodes), 'node')}, master {made.master}"
        tell("start", what + (f", attempt {made.facts.attempt}" if made.facts.attempt > 1 else ""))
    except BaseException as problem:
        run.add_event("start_failed", reason=str(problem))
        stop_nodes(connections, nodes, run, grace=0.0)
        raise


def _still_there(cluster: Cluster, connections: Connections, stored: Stored) -> None:
    on_all(connections, cluster.nodes, lambda node, link: still_there(node, link, stored))


def still_there(node: Node, link: Connection, stored: Stored) -> None:
    """Raise where a node answers no more, or has lost what was pushed for the run."""
    for kind, paths in (("code", stored.code), ("data", stored.data)):
        if node.name in paths and link.call("list", {"path": paths[node.name]})["missing"]:
            hint = "launch the job anew: it is pushed again"
            raise WorkFailed(f"{node.name}: the run's {kind} is gone from {paths[node.name]}", hint)
    link.hello()


def _forwarded(job: Job) -> dict[str, str]:
    from clusterctl.settings import inherited

    found = inherited(job.forward)
    missing = [name for name in job.forward if name not in found]
    if missing:
        raise UsageError(
            f"{job.source}: forward: {', '.join(missing)} is not set here", "set it, or take it off the list"
        )
    return found


def _same_machine_twice(cluster: Cluster, hellos: dict[str, dict[str, Any]]) -> None:
    """One work folder on one kernel under two names would give two nodes one run folder."""
    seen: dict[tuple[str, str, str], str] = {}
    for node in cluster.nodes:
        hello = hellos[node.name]
        place = (str(hello["hostname"]), str(hello["boot_id"]), str(hello["workdir"]))
        if place in seen:
            raise UsageError(
                f"{seen[place]} and {node.name} are the same machine ({place[0]})",
                "keep one of them in the inventory",
            )
        seen[place] = node.name


def _node_plan(made: plan.Plan, node: Node) -> plan.NodePlan:
    return next(one for one in made.nodes if one.node.name == node.name)


def _write_files(link: Connection, one: plan.NodePlan, made: plan.Plan) -> None:
    files = NodeFiles(one.run_dir)
    link.put(files.hostfile, made.hostfile.encode(), mode=0o644)
    if made.facts.rank_table:
        link.put(files.rank_table, made.facts.rank_table.encode(), mode=0o644)
    if one.train is not None:
        link.put(files.train_config, json.dumps(one.train, indent=2).encode(), mode=0o644)


def _start(link: Connection, one: plan.NodePlan, made: plan.Plan) -> dict[str, Any]:
    ranks = [asdict(process) for process in one.processes]
    spec = {
        "run_id": made.facts.run_id,
        "attempt": made.facts.attempt,
        "node": one.node.name,
        "ranks": ranks,
        "grace": made.job.grace,
        "hang_after": made.job.hang_after,
        "kind": one.node.kind,
        "devices": [process.device for process in one.processes],
        "share_devices": made.job.share_devices,
        "master_port": made.facts.master_port if one is made.nodes[0] else None,
    }
    try:
        return link.call("start", {"run_dir": one.run_dir, "spec": spec})
    except RequestFailed as refused:
        if refused.kind == "in_use":
            refused.hint = (
                "clusterctl runs, clusterctl stop; other --devices; --share-devices takes them all the same"
            )
        raise


# -- ask, stop, bring home ----------------------------------------------------------------------------------


def finish(run: RunDir, connections: Connections) -> RunState:
    """After the watch: what the job asked for comes home, then the end is written down."""
    return conclude(run, connections, ended(run, connections))


def ended(
    run: RunDir, connections: Connections, gone: Collection[str] = (), lost: Collection[str] = ()
) -> RunState:
    """How an attempt that was watched to its end came out; a node that is `gone`, or can't be asked, is lost too."""
    state = ask(run, connections, gone)
    nodes = {
        name: "lost" if phase == "unknown" or name in lost else phase for name, phase in state.nodes.items()
    }
    return replace(state, nodes=nodes, phase=_phase(list(nodes.values())))


def conclude(run: RunDir, connections: Connections, state: RunState) -> RunState:
    """The run's last word: what the job asked for comes home, then the end is written down."""
    try:
        for name in collect(run, connections):
            run.add_event("collected", name=name)
    except ClusterctlError as error:
        run.add_event("collect_failed", reason=error.message)
    from clusterctl.report import keep_cause

    cause = keep_cause(run, state)
    run.write_json(run.state, asdict(state))
    more = {"verdict": state.verdict, "cause": cause.title if cause else ""}
    run.add_event("ended", phase=state.phase, **{name: said for name, said in more.items() if said})
    return state


def status(run: RunDir, connections: Connections) -> RunState:
    """The run as its nodes say now; where they can't be asked, as it was seen last."""
    controller = run.controller()
    state, last = ask(run, connections), run.read_state()
    if state.phase == "unknown" and last.get("phase") in FINAL:
        return replace(state_of(last), unreachable=state.unreachable)
    state = replace(state, controller=controller, verdict=last.get("verdict", ""))
    if (
        controller is not None
    ):  # it writes the end itself, after the last byte; between two attempts none runs
        return replace(state, phase=RESTARTING) if last.get("phase") == RESTARTING else state
    if not state.unreachable:
        run.write_json(run.state, asdict(state))
    return state


def ask(
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


def state_of(value: dict[str, Any]) -> RunState:
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


def stop(run: RunDir, connections: Connections, grace: float | None = None) -> dict[str, int]:
    """Ask every node to end its ranks; how many processes are left on each, which should be 0."""
    if run.read_state().get("phase") not in FINAL:
        run.write_json(run.stop_asked, {"asked": time.time()})  # before all else: no attempt may follow
    run.add_event("stop_asked")
    while True:
        record = run.read_record()
        given = record["job"]["grace"] if grace is None else grace
        left = stop_nodes(connections, cluster_of(run).nodes, run, given, strict=True)
        _let_conclude(run)
        if run.read_record()["attempt"] == record["attempt"]:  # else one began just before it was asked
            given_up.clear(run, connections)
            return left


def _let_conclude(run: RunDir) -> None:
    """A controller that lives writes the run's end; what reads the folder next should find it there."""
    deadline = time.monotonic() + SETTLE
    while run.controller() not in (None, os.getpid()) and time.monotonic() < deadline:
        if run.read_state().get("phase") in FINAL:
            return
        time.sleep(0.05)


def stop_nodes(
    connections: Connections,
    nodes: Sequence[Node],
    run: RunDir,
    grace: float,
    strict: bool = False,
    stacks: bool = False,
    hang: Hang | None = None,
) -> dict[str, int]:
    """End an attempt on some nodes; with `stacks`, its ranks say first where they stand; `hang` is why, on its node."""
    record = run.read_record()

    def ask(node: Node, link: Connection) -> int:
        where = {"run_dir": record["run_dirs"][node.name], "attempt": record["attempt"]}
        why = {"hang": hang.as_failure()} if hang and hang.node == node.name else {}
        return int(link.call("stop", {**where, "grace": grace, "stacks": stacks, **why})["left"])

    outcomes = connections.on_each(nodes, ask)
    if strict:
        raise_failures(outcomes)
    return {
        outcome.node.name: outcome.value
        for outcome in outcomes
        if outcome.error is None and outcome.value is not None
    }


def collect(run: RunDir, connections: Connections) -> list[str]:
    """Bring home what the job asked for beside its logs; gives the names of what came."""
    wanted = run.read_record()["job"]["collect"]
    came = bring_checkpoint(run, connections) if contract.CHECKPOINT_DIR in wanted else []
    if contract.PROFILE_DIR in wanted:
        from clusterctl.traces import bring_traces

        came += bring_traces(run, connections)
    return came


def bring_checkpoint(run: RunDir, connections: Connections) -> list[str]:
    """Bring the newest checkpoint home from the first node; gives its name, if there is one."""
    from clusterctl.pull import pull_tree

    first = cluster_of(run).nodes[0]
    link = connections.of(first)
    remote = NodeFiles(run.read_record()["run_dirs"][first.name]).checkpoints
    names = [
        one["name"]
        for one in link.call("list", {"path": remote})["entries"]
        if one["kind"] == "d" and not one["name"].startswith(".")
    ]
    for name in names[-1:]:
        pull_tree(link, f"{remote}/{name}", run.checkpoints / name)
    return names[-1:]
