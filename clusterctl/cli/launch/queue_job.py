"""`submit start`: start a submitted run inside its allocation, or resume it there, and control it to its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.backends.backend import job_of, of_node
from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag
from clusterctl.environment import environment
from clusterctl.errors import ClusterctlError, NodeError, NodesFailed, RunFailed, UsageError
from clusterctl.inventory.cluster import Cluster
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir, find_run
from clusterctl.runs.state import RunState, read_state, write_state

if TYPE_CHECKING:
    from clusterctl.backends.queue import Queue
    from clusterctl.client.attempts import InJob
    from clusterctl.transport.fanout import Connections


# A job that loses a node at each of this many starts is not requeued.
MOST_STARTS = 100


@dataclass
class Signals:
    """The signals of the batch system that this process received."""

    early: bool = False

    def save(self, number: int, _: object) -> None:
        """Act on the early signal as on SIGTERM, but remember it; a second one changes nothing."""
        if not self.early:
            self.early = True
            self.end(number, _)

    def end(self, number: int, _: object) -> None:
        """End the run as SIGTERM does."""
        raise SystemExit(128 + number)


def start(
    run: options.RunName,
    *,
    no_checks: bool = flag("Start without the checks of doctor."),
) -> None:
    """Start or resume a submitted run inside its allocation, and control it to its end. The batch file calls this.
    SIGUSR1 saves, and puts the job back into the queue."""
    from clusterctl.client.attempts import InJob
    from clusterctl.memory import use_one_arena

    use_one_arena()
    # The state of the job is known: it has started.
    found = find_run(options.runs_folder(), run)
    if not found.batch_file.exists():
        remedy = "clusterctl submit --help lists the batch systems"
        raise UsageError(f"{found.run_id} was not submitted to a batch system", remedy)
    cluster = choices.allocated_nodes()
    if cluster is None or not cluster.nodes[0].allocation:
        problem = "this is not an allocation of a batch system"
        raise UsageError(problem, "the batch file of the job calls this command")
    # Hold the lock from the beginning: otherwise a process that follows the run would become its controller.
    with _early_signal() as signals, found.hold(patience=10.0) as ours:
        if not ours:
            raise UsageError(f"{found.run_id} has another controller", "clusterctl status " + found.run_id)
        queue = _queue_of(cluster)
        signal.setitimer(signal.ITIMER_REAL, queue.saves_after(queue.options(found.read_record().job)) or 0)
        try:
            with choices.connected(cluster, begin=True) as connections:
                # The agents start meanwhile.
                cluster = choices.described(cluster)
                attempt = InJob(found, cluster, not no_checks, lambda text: screen.log(text, "yellow"))
                attempt.load()
                _start(attempt, connections)
                _control(attempt, connections)
        except SystemExit:
            if not signals.early or not _requeue(found, cluster, "saved"):
                _note_why(found, cluster)
                raise
        except (RunFailed, NodeError, NodesFailed) as error:
            # The batch system notices a dead node minutes later, and would count this end as that of the job.
            if not _lost_a_node(found, error) or not _requeue(found, cluster, "lost a node"):
                raise
            screen.report_error(error)


@contextmanager
def _early_signal() -> Iterator[Signals]:
    """Save at SIGUSR1 and SIGALRM; end at SIGUSR2, which Grid Engine sends before it kills."""
    signals = Signals()
    actions = {signal.SIGUSR1: signals.save, signal.SIGALRM: signals.save, signal.SIGUSR2: signals.end}
    before = {number: signal.signal(number, action) for number, action in actions.items()}
    try:
        yield signals
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, action in before.items():
            signal.signal(number, action)


def _start(attempt: InJob, connections: Connections) -> None:
    from clusterctl.cli.launch.run import phases, stop_now
    from clusterctl.client.attempts import Reports, begin

    try:
        begin(attempt, connections, Reports(phases, stop_now))
    except ClusterctlError as error:
        _note_unstarted(attempt.run, attempt.cluster, error.message)
        raise


def _note_unstarted(run: RunDir, cluster: Cluster, why: str) -> None:
    """Record why no rank started."""
    state = read_state(run)
    if state is None or not state.is_final:
        write_state(run, RunState(Phase.FAILED, dict.fromkeys(cluster.names, Phase.FAILED), verdict=why))
        run.add_event("start_failed", reason=why)


def _control(attempt: InJob, connections: Connections) -> None:
    """Control the run to its end, and show it in the log of the job; raise RunFailed unless it finished."""
    from clusterctl.cli.launch.follow import Follower
    from clusterctl.cli.launch.run import conclude, show_end
    from clusterctl.report.summary import summarise

    run = attempt.run
    try:
        with Follower(run) as follower:
            for update in attempt.updates(connections):
                follower.show(update)
    except SystemExit:
        screen.log(f"stopping {run.run_id}: a training saves a last checkpoint")
        attempt.stop(connections)
        show_end(summarise(run))
        raise
    state = read_state(run)
    assert state is not None
    conclude(run, state, as_json=False)


def _lost_a_node(run: RunDir, error: ClusterctlError) -> bool:
    """Return whether other nodes may help: a node was lost, or could not be reached at the start."""
    return not isinstance(error, RunFailed) or run.phase() is Phase.LOST


def _requeue(run: RunDir, cluster: Cluster, did: str) -> bool:
    """Put the job back into the queue; return False if it must not be, or the batch system refuses."""
    from clusterctl.backends.queue import write_pending

    queue, job = _queue_of(cluster), job_of(cluster.nodes[0])
    wanted = queue.options(run.read_record().job)
    if not wanted.requeue or queue.starts(environment()) >= MOST_STARTS:
        return False
    run.stop_asked.unlink(missing_ok=True)
    text = f"{did}; {queue.title} job {job} waits for nodes again"
    run.add_event("note", text=text)
    write_pending(run, text)
    screen.log(text)
    try:
        code = queue.requeue(run, job)
    except ClusterctlError as error:
        _note_unstarted(run, cluster, f"{queue.title} does not take job {job} back: {error.message}")
        screen.report_error(error)
        return False
    if code:
        raise SystemExit(code)
    return True


def _note_why(run: RunDir, cluster: Cluster) -> None:
    """Add to the state of a run that the batch system ended the reason for the end."""
    queue, job = _queue_of(cluster), job_of(cluster.nodes[0])
    state = read_state(run)
    why = queue.ends.get(queue.end_of(job), "")
    if state is not None and why:
        write_state(run, replace(state, verdict=f"job {job}: {why}"))
        run.add_event("note", text=why)
        screen.log(why, "yellow")


def _queue_of(cluster: Cluster) -> Queue:
    """Return the batch system whose job holds these nodes."""
    from clusterctl.backends.queue import Queue

    queue = of_node(cluster.nodes[0])
    assert isinstance(queue, Queue)
    return queue
