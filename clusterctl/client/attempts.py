"""The attempts of a run: check a job, start it or resume an ended run, and become its controller.

The command line and the Python API both start runs by these steps.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.backends import backend as backends
from clusterctl.errors import Collected, UsageError

if TYPE_CHECKING:
    from clusterctl.backends.pods.pod import Part
    from clusterctl.client.handover import Starter
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.report.summary import RunSummary
    from clusterctl.runs.prepare.stage import Tell
    from clusterctl.runs.watching.updates import Update
    from clusterctl.transport.fanout import Connections
    from clusterctl.wire.train_summary import TrainSummary


@dataclass(frozen=True)
class Target:
    """A job, the nodes that it starts on, and its spare nodes; in a pod the part that is started here."""

    job: Job
    nodes: Cluster
    spares: tuple[Node, ...] = ()
    part: Part | None = None

    @property
    def reached(self) -> Cluster:
        """Return the nodes that this process starts ranks on."""
        return self.part.here if self.part else self.nodes

    @property
    def checked_job(self) -> Job:
        """Return the job as the checks before a start need it: only node 0 listens at the master port."""
        return replace(self.job, master_port=0) if self.part and self.part.place.index else self.job


@dataclass(frozen=True)
class Launch:
    """The first attempt of a run."""

    run: RunDir
    target: Target
    summary: TrainSummary | None
    """The needs of a training, for the checks of the nodes."""
    checks: bool
    """Whether the nodes are checked first."""

    @classmethod
    def of(cls, target: Target, runs: Path, *, checks: bool, run: RunDir | None = None) -> Launch:
        """Check a job and return its launch; raise InputFaults with all errors. A refused job leaves no folder."""
        from clusterctl.jobs import job_check
        from clusterctl.jobs.parts.saving import with_grace
        from clusterctl.jobs.run_folder import new_run

        summary = job_check.check(target.job, target.nodes)
        job = with_grace(target.job, summary)
        # A missing variable is reported before the code is pushed.
        job_check.forwarded(job)
        return cls(run or new_run(job.name, runs), replace(target, job=job), summary, checks)

    @property
    def reached(self) -> Cluster:
        """Return the nodes to connect to."""
        return self.target.reached

    def start(self, connections: Connections, tell: Tell, *, asks_early: bool = False) -> bool:
        """Start the ranks on all nodes or on none; return True.

        `asks_early`: the nodes are asked for the facts of the plan while they are checked.
        """
        from concurrent.futures import ThreadPoolExecutor

        from clusterctl.checks import doctor
        from clusterctl.runs import start
        from clusterctl.runs.prepare.node_facts import Question
        from clusterctl.runs.prepare.stage import code_of

        target, runs = self.target, self.run.root.parent
        with ThreadPoolExecutor() as aside:
            # The files are looked through while the nodes are reached.
            found = None if target.part else aside.submit(code_of, target.job, runs).result
            question = Question(target.nodes, target.job, connections) if asks_early else None
            if self.checks:
                doctor.before_launch(target.reached, target.checked_job, connections, tell, self.summary)
            if target.part:
                target.part.start(target.job, connections, runs, tell, self.run)
            else:
                start.launch(
                    target.nodes,
                    target.job,
                    connections,
                    runs,
                    tell,
                    self.run,
                    target.spares,
                    question,
                    found,
                )
        return True


@dataclass(frozen=True)
class Resume:
    """The next attempt of a run that has ended."""

    run: RunDir
    job: Job | None = None
    """The job of the attempt where it was changed."""
    elsewhere: Cluster | None = None
    """The nodes of the attempt where they were changed."""

    @classmethod
    def of(cls, run: RunDir, overrides: Sequence[str] = ()) -> Resume:
        """Return the next attempt of a run, with keys of its training changed; raise a UsageError for other keys."""
        from clusterctl.document import Document
        from clusterctl.jobs.overrides import with_overrides

        if not overrides:
            return cls(run)
        job = run.read_record().job
        for text in overrides:
            if job.train is None or not text.startswith("train."):
                raise UsageError(
                    f"--set {text}: an ended run keeps its job; only keys of `train` can be changed",
                    "as in --set train.steps=1000; to change others, launch a new run",
                )
        document = Document(f"{job.name} as launched", {"train": job.train}, {(): 1})
        document = with_overrides(document, overrides)
        return cls(run, replace(job, train=document.value["train"], document=document))

    @property
    def next_job(self) -> Job:
        """Return the job of the attempt."""
        return self.job or self.run.read_record().job

    @property
    def resubmits(self) -> bool:
        """Whether the attempt is a new job of the batch system, which chooses the nodes, as it did before."""
        return self.elsewhere is None and backends.of_run(self.run).resubmits

    def complete(self) -> RunSummary | None:
        """Return the summary of a training whose steps are all done, else None; raise a UsageError if fewer are
        requested now.
        """
        from clusterctl.report.summary import nothing_left, summarise

        summary = summarise(self.run)
        done, wanted = summary.steps_done, (self.next_job.train or {}).get("steps")
        if not summary.is_final or self.next_job.train is None or done is None:
            return None
        if self.job is not None and isinstance(wanted, int):
            if wanted < done:
                problem = f"--set train.steps={wanted}: {done:,} steps of {self.run.run_id} are done"
                raise UsageError(problem, f"set train.steps to more than {done}")
            if wanted > done:
                return None
        return summary if nothing_left(summary) else None

    def check(self) -> None:
        """Raise all errors of the attempt: of its job where that or the nodes were changed, and of its `notify`."""
        from clusterctl.jobs import job_check

        errors, job = Collected(), self.next_job
        if self.job is not None or self.elsewhere is not None:
            with errors:
                job_check.check(replace(job, notify=""), self.elsewhere or self.run.read_record().cluster)
        # A submitted job checks `notify` where it starts. A run that seems to be active may only need a new controller.
        if not self.resubmits and self.run.phase().is_final:
            with errors:
                require_notify(self.run, job)
        errors.raise_all()

    def submit(self) -> int:
        """Submit the attempt to the run's batch system; return the number of its job."""
        return backends.of_run(self.run).submit_again(self.run, self.next_job)

    @property
    def reached(self) -> Cluster:
        """Return the nodes to connect to: those of the attempt, and those of the last one."""
        recorded = self.run.read_record().cluster
        cluster = self.elsewhere or recorded
        names = set(cluster.names)
        former = [node for node in recorded.nodes if node.name not in names]
        return replace(cluster, nodes=(*cluster.nodes, *former))

    def start(self, connections: Connections, tell: Tell) -> bool:
        """Start the attempt; return False if the last one is still running, without a controller."""
        from clusterctl.runs.controller import Control
        from clusterctl.runs.prepare.elsewhere import resume_on
        from clusterctl.runs.query import current_state

        run = self.run
        state = current_state(run, connections)
        if not state.is_final and state.controller is None:
            tell("controller", f"{run.run_id} is running without a controller; starting a new one")
            return False
        require_notify(run, run.read_record().job)
        if self.job is not None:
            run.write_record(replace(run.read_record(), job=self.job))
        if self.elsewhere is not None:
            resume_on(run, self.elsewhere, connections, tell)
        else:
            Control(run, connections).resume(tell)
        return True


@dataclass(frozen=True)
class InJob:
    """The next attempt of a submitted run, inside the job that a batch system has started."""

    run: RunDir
    cluster: Cluster
    """The nodes that the job has now."""
    checks: bool
    note: Callable[[str], object]

    def load(self) -> None:
        """Import what the run needs soon: this takes as long as srun needs to start the agents."""
        import clusterctl.ranktable.from_nodes
        import clusterctl.runs.controller
        import clusterctl.runs.start

        if self.checks:
            import clusterctl.checks.doctor  # noqa: F401

    def start(self, connections: Connections, tell: Tell) -> bool:
        """Start the run, or its next attempt where an earlier start of the job has begun it; return True."""
        record = self.run.read_record()
        if record.attempt:
            self._resume(connections, tell)
            return True
        target = Target(record.job, self.cluster)
        launch = Launch.of(target, self.run.root.parent, checks=self.checks, run=self.run)
        return launch.start(connections, tell, asks_early=True)

    def _resume(self, connections: Connections, tell: Tell) -> None:
        """Continue from the newest checkpoint, on the nodes that the job has now."""
        from clusterctl.jobs.parts.notify import program_problem
        from clusterctl.jobs.phase import Phase
        from clusterctl.runs.decide.attempt import StopRequest
        from clusterctl.runs.prepare.elsewhere import resume_on
        from clusterctl.runs.query import query_nodes
        from clusterctl.runs.state import RunState, write_state
        from clusterctl.runs.stop import stop_nodes

        run, cluster = self.run, self.cluster
        record = run.read_record()
        if problem := program_problem(record.job.notify):
            # The program was there at the first start: the training is worth more than its messages.
            self.note(f"notify: {problem[0]}")
            run.add_event("note", text=f"notify: {problem[0]}")
        now = {node.name: node for node in cluster.nodes}
        # The disk of a node that the job no longer has may be shared: another node then reads its files.
        known = tuple(
            now.get(node.name)
            or replace(node, host=cluster.nodes[0].host, allocation=cluster.nodes[0].allocation)
            for node in record.cluster.nodes
        )
        run.write_record(replace(record, cluster=replace(record.cluster, nodes=known)))
        # End leftover processes of an earlier start on the nodes.
        stop_nodes(connections, [node for node in known if node.name in now], run, StopRequest(0.0))
        if not query_nodes(run, connections).is_final:
            # A node that cannot be reached, and whose disk is not shared, runs no process of this job any more.
            write_state(run, RunState(Phase.LOST, dict.fromkeys(record.cluster.names, Phase.LOST)))
        resume_on(run, cluster, connections, tell)

    def updates(self, connections: Connections) -> Iterator[Update]:
        """Control the run to its end; yield what happens in it."""
        from clusterctl.runs.controller import Control

        yield from Control(self.run, connections)

    def stop(self, connections: Connections) -> None:
        """Stop the run, and copy its last output."""
        from clusterctl.runs.controller import Control
        from clusterctl.runs.stop import stop_run

        stop_run(self.run, connections)
        for _ in Control(self.run, connections, lines=False):
            pass


def require_notify(run: RunDir, job: Job) -> None:
    """Raise a UsageError if the command of `notify` cannot start on this machine, where the controller will run."""
    from clusterctl.jobs.parts.notify import program_problem

    if problem := program_problem(job.notify):
        remedy = "put the program back, or resume in the folder and with the PATH of the launch"
        raise UsageError(f"{run.run_id}: notify: {problem[0]}", f"a run keeps its `notify`: {remedy}")


@dataclass(frozen=True)
class Reports:
    """How a start is shown, and what happens when it is interrupted."""

    phases: Callable[[Connections], AbstractContextManager[Tell]]
    """Returns what is called with the name of each phase and what it did."""
    stop: Callable[[RunDir, Connections, BaseException], object]
    """Ends what was started before the interrupt."""
    clear: Callable[[RunDir], object] = lambda run: None
    """Starts a process that ends ranks on nodes which a failed start could not reach any more."""


def begin(
    attempt: Launch | Resume | InJob,
    connections: Connections,
    reports: Reports,
    then: Callable[[], object] = lambda: None,
) -> bool:
    """Start an attempt, and call `then`; return False if one runs already. An interrupt stops what was started."""
    try:
        with reports.phases(connections) as tell:
            has_started = attempt.start(connections, tell)
        then()
    except BaseException as problem:
        if attempt.run.record.exists():
            if isinstance(problem, (KeyboardInterrupt, SystemExit)):
                reports.stop(attempt.run, connections, problem)
            if attempt.run.read_record().abandoned:
                reports.clear(attempt.run)
        raise
    return has_started


def start_and_control(
    attempt: Launch | Resume, connections: Connections, starter: Starter, reports: Reports
) -> None:
    """Start an attempt and control its run to the end, with one login per node for both.

    If an attempt of another process continues, that one is controlled. The process that waits gets the number of the
    first attempt that is to be shown.
    """
    from clusterctl.runs import in_charge

    run = attempt.run
    leave_on_sigterm = signal.getsignal(signal.SIGTERM)

    def stay() -> None:
        in_charge.ignore_terminal()
        # If this process ended before the one that waits knows that the ranks run, no process would stop them. That
        # process passes its signals on, and acts on the same one. Blocking the signal is not enough: another thread
        # of this process would receive it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    has_started = begin(attempt, connections, reports, stay)
    first = run.read_record().attempt

    def started() -> None:
        starter.started(first, run.controller_log)
        signal.signal(signal.SIGTERM, leave_on_sigterm)

    if not in_charge.serve(run, connections, started, started=has_started):
        started()
