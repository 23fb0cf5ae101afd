"""Start a run, or its next attempt, on its nodes: push, plan, write the files, start the supervisors."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from clusterctl.agent.ranks import mpi_links
from clusterctl.checkpoints.restart import bring_checkpoint
from clusterctl.checkpoints.shared import check_shared
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.files import replace_file
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job_check, plan
from clusterctl.jobs.job import Job, devices_on
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT, RunRecord
from clusterctl.jobs.run_folder import NodeFiles, RunDir, new_run
from clusterctl.runs import abandoned
from clusterctl.runs.decide.attempt import StopRequest
from clusterctl.runs.prepare import node_facts
from clusterctl.runs.prepare.setups import run_setups
from clusterctl.runs.prepare.stage import (
    Code,
    Stored,
    Tell,
    push_code,
    push_data,
    stage_again,
)
from clusterctl.runs.prepare.work import WorkFolders
from clusterctl.runs.query import current_state
from clusterctl.runs.state import RunState, end_half_line, write_state
from clusterctl.runs.stop import send_stop
from clusterctl.storage.address import parse_address
from clusterctl.storage.client import check_access
from clusterctl.storage.credentials import access_to
from clusterctl.text import plural
from clusterctl.transport.fanout import on_all
from clusterctl.transport.link import RequestFailed

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.runs.prepare.node_facts import Question
    from clusterctl.transport.answers import Hello
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections

# Limit of characters of files that a node gets with the start request; a rank table of 10,000 nodes is longer.
MOST_WITH_START = 1 << 20


def launch(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    runs: Path,
    tell: Tell,
    run: RunDir | None = None,
    spares: Sequence[Node] = (),
    question: Question | None = None,
    found: Callable[[], Code] | None = None,
) -> RunDir:
    """Start a run on all of its nodes, or on none of them; return the run's folder.

    `question` asks the nodes for their facts; the caller has sent it already. `found` returns the program to push.
    Code and data are pushed to the spare nodes too: so a restart does not depend on local files that may have changed.
    """
    run = run or new_run(job.name, runs)
    everywhere = replace(cluster, nodes=(*cluster.nodes, *spares))
    hellos = reach(everywhere, connections, tell)
    code = push_code(everywhere, job, connections, tell, runs, found)

    def push_again(altered: Cluster) -> None:
        push_code(altered, job, connections, tell, runs)

    work = _begin_work(run, cluster, job, connections, hellos, code, push_again)
    run_setups(cluster, job, connections, work.paths if job.prepares_work else code, tell)
    data = push_data(everywhere, job, connections, tell)
    facts = prepare(cluster, job, connections, hellos, Stored(code, data), tell, question)
    made = plan.make_plan(cluster, job, replace(facts, run_id=run.run_id))
    work.ready()
    try:
        start_all(run, made, connections, tell, spares)
    except BaseException as problem:
        write_unstarted(run, cluster, problem)
        raise
    return run


def write_unstarted(run: RunDir, cluster: Cluster, problem: BaseException) -> None:
    """Record that an attempt failed to start, or was interrupted before it did."""
    if not run.record.exists():
        # The error that prevented the start is reported instead.
        return
    phase = Phase.FAILED if isinstance(problem, Exception) else Phase.STOPPED
    write_state(run, RunState(phase, dict.fromkeys(cluster.names, Phase.STOPPED)))


def resume(
    run: RunDir, connections: Connections, tell: Tell, chosen: Callable[[], Cluster] | None = None
) -> None:
    """Start the next attempt of a run that has ended, on the same nodes or on those that `chosen` returns."""
    run.read_record().require_known_format()
    state = current_state(run, connections)
    if not state.is_final:
        hint = f"clusterctl attach {run.run_id} follows it, clusterctl stop {run.run_id} ends it"
        if state.phase is Phase.UNKNOWN:
            hint = f"clusterctl attach {run.run_id} waits for its nodes; if they stay away, it is lost in 10 minutes"
        raise UsageError(f"{run.run_id} is {state.phase}, not ended", hint)
    run.stop_asked.unlink(missing_ok=True)
    run.add_event("resumed")
    try:
        start_next(run, chosen() if chosen else run.read_record().cluster, connections, tell)
    except BaseException as problem:
        write_unstarted(run, run.read_record().cluster, problem)
        raise


def start_next(
    run: RunDir,
    cluster: Cluster,
    connections: Connections,
    tell: Tell,
    before: Callable[[plan.Plan], None] = lambda made: None,
) -> None:
    """Start the next attempt on these nodes, with a new rank table and hostfile. `before` is called with the plan."""
    record = run.read_record()
    record.require_known_format()
    job = record.job
    hellos = reach(cluster, connections, tell)
    stored = Stored(record.code_paths, record.data_paths)
    stage_again(cluster, job, connections, stored, tell)
    _count_on_after_loss(run, record, cluster.nodes[0], connections)

    def push_again(altered: Cluster) -> None:
        stage_again(altered, job, connections, stored, tell)

    work = _begin_work(run, cluster, job, connections, hellos, stored.code, push_again)
    run_setups(cluster, job, connections, work.paths if job.prepares_work else stored.code, tell)
    facts = prepare(cluster, job, connections, hellos, stored, tell)
    facts = replace(facts, run_id=run.run_id, attempt=record.attempt + 1)
    made = plan.make_plan(cluster, job, facts)
    before(made)
    if text := bring_checkpoint(run, made, connections):
        run.add_event("note", text=text)
        tell("checkpoint", text)
    work.ready()
    start_all(run, made, connections, tell)


def _begin_work(
    run: RunDir,
    cluster: Cluster,
    job: Job,
    connections: Connections,
    hellos: Mapping[str, Hello],
    code: Mapping[str, str],
    push_again: Callable[[Cluster], object],
) -> WorkFolders:
    """Begin to make the working folders of a program; return when they are there if a setup starts in them."""
    dirs = {node.name: plan.run_dir_in(hellos[node.name].workdir, run.run_id, node) for node in cluster.nodes}
    work = WorkFolders(cluster, job, connections, code, dirs, push_again)
    if job.prepares_work:
        work.ready()
    return work


def _count_on_after_loss(run: RunDir, record: RunRecord, first: Node, connections: Connections) -> None:
    """Append further metrics to the local copy, if the node of rank 0 lost its own."""
    folder = record.run_dirs.get(first.name)
    if folder and connections.of(first).directory(folder).missing:
        run.write_record(replace(record, metrics_base=end_half_line(run)))


def reach(cluster: Cluster, connections: Connections, tell: Tell) -> dict[str, Hello]:
    """Return the greeting of every node; raise an error if one does not answer."""
    hellos = on_all(connections, cluster.nodes, lambda node, link: link.hello())
    tell("reach", f"{plural(len(hellos), 'node')} reached")
    _refuse_one_machine_twice(cluster, hellos)
    return hellos


def prepare(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    hellos: dict[str, Hello],
    stored: Stored,
    tell: Tell,
    question: Question | None = None,
) -> plan.Facts:
    """Return the facts about a run that only its nodes know."""
    if folder := saving_of(job.train).dir:
        tell("checkpoint", check_shared(folder, cluster.nodes, connections))

    if address := saving_of(job.train).to:
        access = access_to(parse_address(address), job.storage)
        check_access(cluster.nodes, access, connections.of)
        tell("store", f"{access.address} takes checkpoints from {plural(len(cluster.nodes), 'node')}")

    found = question.answer() if question is not None else node_facts.ask(cluster, job, connections)
    if found.note:
        tell("ranktable", found.note)
    return plan.Facts(
        master_port=found.master_port,
        workdirs={name: hello.workdir for name, hello in hellos.items()},
        homes={name: hello.home for name, hello in hellos.items()},
        cpus=_processors({node.name: hellos[node.name] for node in cluster.nodes}),
        code_paths=stored.code,
        data_paths=stored.data,
        forwarded=job_check.forwarded(job)
        | ({mpi_links.KEY: token_hex(32)} if plan.needs_links(job) else {}),
        rank_table=found.rank_table,
    )


def _processors(hellos: Mapping[str, Hello]) -> dict[str, int]:
    """Return the number of processors for the ranks of each node; nodes that are one machine share its processors."""
    sharing = Counter(hello.boot_id or name for name, hello in hellos.items())
    return {
        name: max(1, min(hello.cpus, hello.machine_cpus // sharing[hello.boot_id or name]))
        for name, hello in hellos.items()
    }


def start_all(
    run: RunDir, made: plan.Plan, connections: Connections, tell: Tell, spares: Sequence[Node] = ()
) -> None:
    """Start an attempt on all of its nodes, or on none if one of them fails or if a stop of the run was requested."""
    nodes = made.cluster.nodes
    record_attempt(run, made, spares)
    run.cause.unlink(missing_ok=True)
    try:
        answers = on_all(connections, nodes, lambda node, link: _start(link, _node_plan(made, node), made))
        for name, answer in answers.items():
            if answer.note:
                run.add_event("note", node=name, text=f"{name}: {answer.note}")
        # A stop requested meanwhile may have reached the nodes before the attempt started there.
        if run.stop_asked.exists():
            raise WorkFailed(f"{run.run_id} was stopped while attempt {made.facts.attempt} started")
        facts = {"attempt": made.facts.attempt, "port": made.facts.master_port}
        run.add_event("started", nodes=made.cluster.names, ranks=made.world_size, **facts)
        subject = f"{plural(made.world_size, 'rank')} on {plural(len(nodes), 'node')}, master {made.master}"
        tell("start", subject + (f", attempt {made.facts.attempt}" if made.facts.attempt > 1 else ""))
    except BaseException as problem:
        run.add_event("start_failed", reason=str(problem))
        outcomes = send_stop(connections, nodes, run, StopRequest(0.0))
        # Ranks may have started on a node that does not answer any more.
        abandoned.note(run, [outcome.node.name for outcome in outcomes if not outcome.ok])
        raise


def record_attempt(run: RunDir, made: plan.Plan, spares: Sequence[Node] = ()) -> None:
    """Write the record, the plan and the texts of an attempt that is about to start."""
    before = run.read_record() if run.record.exists() else None
    waited = before is not None and before.attempt == 0
    # The record of a run that waited in a queue names nodes that do not exist.
    before = None if waited else before
    run.write_record(_record_of(run, made, before, tuple(spares)))
    shown = _without_secrets(made).as_json()
    run.write_json(run.plan, shown)
    replace_file(run.hostfile, made.hostfile, 0o600)
    if made.facts.rank_table:
        replace_file(run.rank_table, made.facts.rank_table, 0o600)
    if before or waited:
        write_state(run, RunState(Phase.RUNNING, dict.fromkeys(made.cluster.names, Phase.RUNNING)))
    run.add_event("planned", ranks=made.world_size, attempt=made.facts.attempt)


def _record_of(run: RunDir, made: plan.Plan, before: RunRecord | None, spares: tuple[Node, ...]) -> RunRecord:
    """Return the record of an attempt; values that belong to the entire run come from the record `before`."""
    record = RunRecord(
        run=run.run_id,
        attempt=made.facts.attempt,
        job=made.job,
        cluster=made.cluster,
        run_dirs={part.node.name: part.run_dir for part in made.nodes},
        ranks={part.node.name: tuple(process.rank for process in part.processes) for part in made.nodes},
        devices={part.node.name: tuple(process.device for process in part.processes) for part in made.nodes},
        created=before.created if before else time.time(),
        code_paths=before.code_paths if before else dict(made.facts.code_paths),
        data_paths=before.data_paths if before else dict(made.facts.data_paths),
        spares=before.spares if before else spares,
        size=before.full_size if before else len(made.cluster.nodes),
        format=FORMAT,
        saved_as=before.saved_as if before else made.facts.saved_as,
        parts=made.facts.parts,
    )
    if before is None:
        return record
    return replace(record, abandoned=before.abandoned, metrics_base=before.metrics_base)


def _without_secrets(made: plan.Plan) -> plan.Plan:
    """Blank values that were forwarded from the user's environment: records must not contain them."""
    secrets = dict.fromkeys(made.facts.forwarded, "***")

    def blank(process: plan.ProcessSpec) -> plan.ProcessSpec:
        return replace(process, env={name: secrets.get(name, text) for name, text in process.env.items()})

    nodes = (replace(part, processes=tuple(map(blank, part.processes))) for part in made.nodes)
    return replace(made, nodes=tuple(nodes))


def check_stored(node: Node, link: Connection, stored: Stored) -> None:
    """Raise an error if a node does not answer, or has lost what was pushed to it for the run."""
    for kind, paths in (("code", stored.code), ("data", stored.data)):
        if node.name in paths and link.directory(paths[node.name]).missing:
            hint = "launch the job again: that pushes it again"
            raise WorkFailed(f"{node.name}: the run's {kind} is gone from {paths[node.name]}", hint)
    link.hello()


def _refuse_one_machine_twice(cluster: Cluster, hellos: dict[str, Hello]) -> None:
    """Raise a UsageError if two nodes are one machine with one work folder: they would share the run's folder."""
    seen: dict[tuple[str, str, str], str] = {}
    for node in cluster.nodes:
        hello = hellos[node.name]
        machine = (hello.hostname, hello.boot_id, hello.workdir)
        if machine in seen:
            raise UsageError(
                f"{seen[machine]} and {node.name} are the same machine ({machine[0]})",
                "keep one of them in the inventory",
            )
        seen[machine] = node.name


def _node_plan(made: plan.Plan, node: Node) -> plan.NodePlan:
    return next(part for part in made.nodes if part.node.name == node.name)


def _files(part: plan.NodePlan, made: plan.Plan) -> dict[str, str]:
    """Return by path the files that a node's ranks need in the run's folder."""
    files = NodeFiles(part.run_dir)
    result = {files.hostfile: made.hostfile}
    if made.facts.rank_table:
        result[files.rank_table] = made.facts.rank_table
    if made.linked:
        result[files.mpi_links] = Path(mpi_links.__file__).read_text(encoding="utf-8")
    if part.train is not None:
        result[files.train_config] = json.dumps(part.train, indent=2)
    return result


@dataclass(frozen=True)
class Started:
    """The answer of a node that has started its ranks; `note` is for the run's history."""

    note: str = ""


def _start(link: Connection, part: plan.NodePlan, made: plan.Plan) -> Started:
    ranks = [asdict(process) for process in part.processes]
    spec = {
        "run_id": made.facts.run_id,
        "attempt": made.facts.attempt,
        "node": part.node.name,
        "ranks": ranks,
        "grace": made.job.grace,
        "log_limit": made.job.log_limit,
        "hang_after": made.job.hang_after,
        "world": made.world,
        "kind": part.node.kind,
        # A process per node uses all devices of the node.
        "devices": list(devices_on(made.job, part.node)),
        "share_devices": made.job.share_devices,
        "secrets": sorted(made.facts.forwarded),
        "setup": part.setup,
        "work": made.job.work_on(part.run_dir),
        # What the run needs of the node's store: `runs prune` leaves it there.
        "stored": [
            paths[part.node.name]
            for paths in (made.facts.code_paths, made.facts.data_paths)
            if part.node.name in paths
        ],
        "master_port": made.facts.master_port if any(rank["rank"] == 0 for rank in ranks) else None,
    }
    files = _files(part, made)
    if sum(map(len, files.values())) > MOST_WITH_START:
        for path, text in files.items():
            link.put(path, text.encode(), mode=0o644)
        files = {}
    try:
        return link.ask(Started, "start", {"run_dir": part.run_dir, "spec": spec, "files": files})
    except RequestFailed as refused:
        if refused.kind == "in_use":
            refused.hint = (
                "stop that run (`clusterctl runs`), choose other --devices, or share them: --share-devices"
            )
        raise
