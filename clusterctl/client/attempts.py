"""The attempts of a run: check a job, start it or resume an ended run, and become its controller.

The command line and the Python API both start runs by these steps.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from clusterctl.backends.pods.pod import Part
    from clusterctl.client.handover import Starter
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.runs.prepare.stage import Tell
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
        from clusterctl.jobs.parts.grace import with_grace
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


def begin(
    attempt: Launch | Resume,
    connections: Connections,
    reports: Reports,
    then: Callable[[], object] = lambda: None,
) -> bool:
    """Start an attempt, and call `then`; return False if one runs already. An interrupt stops what was started."""
    try:
        with reports.phases(connections) as tell:
            has_started = attempt.start(connections, tell)
        then()
    except (KeyboardInterrupt, SystemExit) as interrupt:
        if attempt.run.record.exists():
            reports.stop(attempt.run, connections, interrupt)
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
