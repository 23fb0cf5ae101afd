"""Start, watch, stop, ask: verbs over a Plan, the connections to its nodes, and the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl import contract, plan
from clusterctl.aftermath import placed, when, with_aftermath
from clusterctl.errors import ClusterctlError, NodeError, NodesFailed, UsageError, WorkFailed
from clusterctl.inventory import Cluster, Node
from clusterctl.job import Job
from clusterctl.record import cluster_of, job_of, write_run
from clusterctl.rundir import NodeFiles, RunDir, new_run_id
from clusterctl.words import size, some

if TYPE_CHECKING:
    from clusterctl.push import Manifest
    from clusterctl.transport import Connection, Connections, Outcome

FINAL = ("finished", "failed", "stopped", "lost")
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"

Tell = Callable[[str, str], None]
"""What waits is told of each phase: its name, and what came of it."""


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

    @property
    def is_final(self) -> bool:
        return self.phase in FINAL


# -- start --------------------------------------------------------------------------------------------------


def launch(cluster: Cluster, job: Job, connections: Connections, runs: Path, tell: Tell) -> RunDir:
    """Push, write and start a run on all of its nodes, or leave none of it running; gives the run's folder."""
    run = RunDir(runs / new_run_id(job.name))
    hellos = reach(cluster, connections, tell)
    code = _push_code(cluster, job, connections, tell)
    data = _push_data(cluster, job, connections, tell)
    facts = prepare(cluster, job, connections, hellos, Stored(code, data), tell)
    _start_all(run, plan.make_plan(cluster, job, replace(facts, run_id=run.run_id)), connections, tell)
    return run


def resume(run: RunDir, connections: Connections, tell: Tell) -> None:
    """Start an ended run's next attempt: the same nodes, code and data, the same folders."""
    record, cluster, job = run.read_record(), cluster_of(run), job_of(run)
    state = status(run, connections)
    if not state.is_final:
        hint = f"clusterctl attach {run.run_id} follows it, clusterctl stop {run.run_id} ends it"
        raise UsageError(f"{run.run_id} is {state.phase}, not ended", hint)
    hellos = reach(cluster, connections, tell)
    stored = Stored(record["code_paths"], record["data_paths"])
    _still_there(cluster, connections, stored)
    facts = prepare(cluster, job, connections, hellos, stored, tell)
    facts = replace(facts, run_id=run.run_id, attempt=record["attempt"] + 1)
    _start_all(run, plan.make_plan(cluster, job, facts), connections, tell)


@dataclass(frozen=True)
class Stored:
    """Where each node keeps what was pushed for a run."""

    code: dict[str, str] = field(hash=False)
    data: dict[str, str] = field(hash=False)


def reach(cluster: Cluster, connections: Connections, tell: Tell) -> dict[str, dict[str, Any]]:
    """Every node's own word on who it is."""
    hellos = _on_all(connections, cluster.nodes, lambda node, link: link.hello())
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


def _start_all(run: RunDir, made: plan.Plan, connections: Connections, tell: Tell) -> None:
    nodes = made.cluster.nodes
    write_run(run, made)
    try:
        _on_all(connections, nodes, lambda node, link: _write_files(link, _node_plan(made, node), made))
        _on_all(connections, nodes, lambda node, link: _start(link, _node_plan(made, node), made))
        run.add_event("started", nodes=made.cluster.names, ranks=made.world_size, attempt=made.facts.attempt)
        what = f"{some(made.world_size, 'rank')} on {some(len(nodes), 'node')}, master {made.master}"
        tell("start", what + (f", attempt {made.facts.attempt}" if made.facts.attempt > 1 else ""))
    except BaseException as problem:
        run.add_event("start_failed", reason=str(problem))
        stop_nodes(connections, nodes, run, grace=0.0)
        run.write_json(run.state, asdict(RunState("failed", {node.name: "stopped" for node in nodes})))
        raise


def _still_there(cluster: Cluster, connections: Connections, stored: Stored) -> None:
    def look(node: Node, link: Connection) -> None:
        for kind, paths in (("code", stored.code), ("data", stored.data)):
            if node.name in paths and link.call("list", {"path": paths[node.name]})["missing"]:
                hint = "launch the job anew: it is pushed again"
                raise WorkFailed(f"{node.name}: the run's {kind} is gone from {paths[node.name]}", hint)

    _on_all(connections, cluster.nodes, look)


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


def free_port(link: Connection, node: Node) -> int:
    """A port that is free on the master itself."""
    done = link.run([node.python, "-c", FREE_PORT], timeout=20.0)
    if done.exit_code != 0 or not done.stdout.strip().isdigit():
        words = done.error_text.strip().splitlines()
        hint = "see `python` in the inventory: the program that the ranks are run with"
        raise WorkFailed(
            f"{node.name}: {node.python} gives no free port: {words[-1] if words else done.exit_code}", hint
        )
    return int(done.stdout)


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


def _push_code(cluster: Cluster, job: Job, connections: Connections, tell: Tell) -> dict[str, str]:
    from clusterctl import push

    if job.train is not None:
        root, manifest = trainer_code()
    elif job.code is not None:
        root, manifest = job.code, push.make_manifest(job.code)
    else:
        return {}
    return _push(cluster, connections, root, manifest, "code", tell)


def _push_data(cluster: Cluster, job: Job, connections: Connections, tell: Tell) -> dict[str, str]:
    from clusterctl import push

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
        stored = _on_all(
            connections,
            cluster.nodes,
            lambda node, link: push.push_store(link, source, kind, relay=relay),
        )
    new = sum(not one.unchanged for one in stored.values())
    seconds = time.monotonic() - began
    what = f"{some(len(manifest.files), 'file')}, {size(manifest.size)}"
    tell(f"push {kind}", f"{what} to {new} of {some(len(stored), 'node')} in {seconds:.1f} s")
    return {name: one.path for name, one in stored.items()}


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
    }
    return link.call("start", {"run_dir": one.run_dir, "spec": spec})


def _on_all(
    connections: Connections, nodes: Sequence[Node], work: Callable[[Node, Connection], Any]
) -> dict[str, Any]:
    """The same work on all nodes at once; every node that fails is named."""
    outcomes = connections.on_each(nodes, work)
    raise_failures(outcomes)
    return {outcome.node.name: outcome.value for outcome in outcomes}


def raise_failures(outcomes: Sequence[Outcome[Any]]) -> None:
    """One error for all nodes that failed: unreachable ones first, since nothing else can be believed before."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    unreachable = [error for error in errors if isinstance(error, NodeError)]
    if unreachable:
        raise unreachable[0] if len(unreachable) == 1 else NodesFailed(unreachable)
    if errors:
        hints = "\n".join(dict.fromkeys(error.hint for error in errors if error.hint))
        raise (
            errors[0] if len(errors) == 1 else WorkFailed("\n".join(error.message for error in errors), hints)
        )


# -- ask, stop, bring home ----------------------------------------------------------------------------------


def finish(run: RunDir, connections: Connections) -> RunState:
    """After the watch: what the job asked for comes home, then the end is written down."""
    try:
        for name in collect(run, connections):
            run.add_event("collected", name=name)
    except ClusterctlError as error:
        run.add_event("collect_failed", reason=error.message)
    state = _asked(run, connections)
    gone = {name: "lost" if phase == "unknown" else phase for name, phase in state.nodes.items()}
    state = replace(state, nodes=gone, phase=_phase(list(gone.values())))
    run.write_json(run.state, asdict(state))
    run.add_event("ended", phase=state.phase)
    return state


def status(run: RunDir, connections: Connections) -> RunState:
    """The run as its nodes say now; where they can't be asked, as it was seen last."""
    state, last = _asked(run, connections), run.read_state()
    if state.phase == "unknown" and last.get("phase") in FINAL:
        return replace(state_of(last), unreachable=state.unreachable)
    if not state.unreachable and not run.is_watched():  # a living watcher writes the end itself, after the last byte
        run.write_json(run.state, asdict(state))
    return state


def _asked(run: RunDir, connections: Connections) -> RunState:
    record = run.read_record()

    def asked(node: Node, link: Connection) -> dict[str, Any]:
        where = {"run_dir": record["run_dirs"][node.name], "attempt": record["attempt"]}
        return with_aftermath(link, link.call("state", where))

    return read_answers(record, connections.on_each(cluster_of(run).nodes, asked), _last_step(run))


def state_of(value: dict[str, Any]) -> RunState:
    """A state that a run's folder keeps."""
    return RunState(**{**value, "ranks": tuple(value.get("ranks", ()))})


def read_answers(
    record: dict[str, Any], outcomes: Sequence[Outcome[Any]], step: dict[str, Any] | None
) -> RunState:
    """One state out of what the nodes answered."""
    nodes: dict[str, str] = {}
    ranks: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    unreachable: dict[str, str] = {}
    for outcome in outcomes:
        name = outcome.node.name
        if outcome.error is not None:
            unreachable[name] = getattr(outcome.error, "reason", str(outcome.error))
            nodes[name] = "unknown"
            continue
        answer = outcome.get()
        nodes[name] = (answer["node"] or {"state": "unknown"})["state"]
        devices = dict(zip(record["ranks"][name], record["devices"][name], strict=True))
        there = [placed(one, answer) for one in answer["ranks"]]
        ranks += [{**one, "node": name, "device": devices.get(one["rank"])} for one in there]
        failure = (answer["node"] or {}).get("first_failure")
        if failure:
            whole = next((one for one in there if one["rank"] == failure["rank"]), {})
            failures.append({**whole, **failure, "node": name, "device": devices.get(failure["rank"])})
    return RunState(
        _phase(list(nodes.values())), nodes, tuple(ranks), first_failure(failures), step, unreachable
    )


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
    record = run.read_record()
    run.add_event("stop_asked")
    return stop_nodes(
        connections, cluster_of(run).nodes, run, record["job"]["grace"] if grace is None else grace, strict=True
    )


def stop_nodes(
    connections: Connections, nodes: Sequence[Node], run: RunDir, grace: float, strict: bool = False
) -> dict[str, int]:
    record = run.read_record()

    def ask(node: Node, link: Connection) -> int:
        where = {"run_dir": record["run_dirs"][node.name], "attempt": record["attempt"], "grace": grace}
        return int(link.call("stop", where)["left"])

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
    from clusterctl.pull import pull_tree

    record = run.read_record()
    came: list[str] = []
    if contract.CHECKPOINT_DIR in record["job"]["collect"]:
        first = cluster_of(run).nodes[0]
        link = connections.of(first)
        remote = NodeFiles(record["run_dirs"][first.name]).checkpoints
        names = [
            one["name"]
            for one in link.call("list", {"path": remote})["entries"]
            if one["kind"] == "d" and not one["name"].startswith(".")
        ]
        for name in names[-1:]:
            pull_tree(link, f"{remote}/{name}", run.checkpoints / name)
            came.append(name)
    return came
