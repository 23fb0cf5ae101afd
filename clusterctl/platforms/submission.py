"""A run that a Slurm job starts: what was submitted, and the state that Slurm reports."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job, devices_on
from clusterctl.jobs.parts.slurm import SlurmOptions
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT, RunRecord
from clusterctl.platforms import slurm
from clusterctl.platforms.allocation import KINDS
from clusterctl.runs.state import RunState, read_state, write_state
from clusterctl.text import escape_controls
from clusterctl.wire.typed_json import BadValue, decode, encode

if TYPE_CHECKING:
    from clusterctl.jobs.run_folder import RunDir

# Slurm's states of a job that waits, and of one that has nodes.
WAITING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")
# Seconds in which Slurm puts a job back into the queue.
SETTLE = 1.0
# How a job ended, for people.
ENDS = {
    "TIMEOUT": "Slurm ended the job at its time limit",
    "DEADLINE": "Slurm ended the job at its deadline",
    "PREEMPTED": "Slurm preempted the job for another one",
    "NODE_FAIL": "a node of the Slurm job failed",
    "BOOT_FAIL": "a node of the Slurm job did not boot",
    "CANCELLED": "the Slurm job was cancelled",
    "OUT_OF_MEMORY": "Slurm killed the job because its memory ran out",
    "FAILED": "the batch file of the Slurm job failed",
}
# What slurmstepd writes to the log when Slurm ends a job, and what `submit start` does before it requeues one.
STEPD = {
    "PREEMPTION": ENDS["PREEMPTED"],
    "TIME LIMIT": ENDS["TIMEOUT"],
    "NODE FAILURE": ENDS["NODE_FAIL"],
}
PUT_BACK = re.compile(
    rf"CANCELLED AT \S+ DUE TO (?P<stepd>{'|'.join(STEPD)})|^(?P<ours>[a-z ]+); Slurm job \d+ waits",
    re.MULTILINE,
)
# Bytes at the end of the log that are searched.
LOG_END = 16_384


@dataclass(frozen=True)
class Submission:
    """The job of a run, in slurm.json of its folder."""

    job: int
    submitted: float
    ended: str = ""
    """Slurm's final state of the job; "" until it is known."""


def submission_file(run: RunDir) -> Path:
    return run.root / "slurm.json"


def read_submission(run: RunDir) -> Submission | None:
    """Return what was submitted for a run; None for a run that no Slurm job runs, or whose file is damaged."""
    path = submission_file(run)
    if not path.exists():
        return None
    try:
        return decode(Submission, run.read_json(path))
    except (BadValue, UsageError):
        return None


def write_submission(run: RunDir, submission: Submission) -> None:
    run.write_json(submission_file(run), encode(submission))


def imagined(options: SlurmOptions) -> Cluster:
    """Return nodes like those that a job asks for, to check it before it has any."""
    name, _, rest = options.gres.partition(":")
    count = rest.rpartition(":")[2]
    kind = KINDS.get(name.lower(), "cpu")
    devices = tuple(range(int(count) if count.isdecimal() else 1))
    names = [f"slurm{number}" for number in range(1, options.nodes + 1)]
    nodes = [Node(each, each, each, server_id=each, kind=kind, devices=devices) for each in names]
    return Cluster("slurm", tuple(nodes), source="the job's slurm part")


def write_waiting(run: RunDir, job: Job, cluster: Cluster) -> None:
    """Record a run whose nodes are not known yet; attempt 0 has never started."""
    ranks: dict[str, tuple[int, ...]] = {}
    devices = {node.name: devices_on(job, node) for node in cluster.nodes}
    for name, own in devices.items():
        first = sum(map(len, ranks.values()))
        ranks[name] = tuple(range(first, first + len(own)))
    nothing = dict.fromkeys(cluster.names, "")
    record = RunRecord(run.run_id, 0, job, cluster, nothing, ranks, devices, time.time(), format=FORMAT)
    run.write_record(record)
    write_pending(run, "submitted to Slurm")


def write_pending(run: RunDir, verdict: str) -> None:
    """Record that a run waits for nodes, and why."""
    write_state(run, RunState(Phase.PENDING, {}, verdict=verdict))


def refresh(run: RunDir, queue: Mapping[int, slurm.QueueEntry] | None = None) -> None:
    """Bring the recorded state of a submitted run up to date with what Slurm says of its job."""
    submission = read_submission(run)
    if submission is None or submission.ended:
        return
    # A machine without Slurm's programs shows what was recorded last.
    with contextlib.suppress(ClusterctlError):
        entry = _entry(slurm.queue() if queue is None else queue, submission.job)
        if entry.state not in (*ACTIVE, *WAITING) and not run.phase().is_final:
            # A job that is being put back into the queue looks for a moment as if it had ended.
            time.sleep(SETTLE)
            entry = _entry(slurm.queue(), submission.job)
        _note(run, submission, entry)


def _entry(queue: Mapping[int, slurm.QueueEntry], job: int) -> slurm.QueueEntry:
    return queue.get(job) or slurm.ended_job(job)


def _note(run: RunDir, submission: Submission, entry: slurm.QueueEntry) -> None:
    before = read_state(run) or RunState(Phase.RUNNING, {})
    if entry.state in WAITING:
        if run.controller() is not None:
            # The answer came late: the job has started meanwhile.
            return
        verdict = describe(submission.job, entry, put_back(run))
        if (before.phase, before.verdict) != (Phase.PENDING, verdict):
            write_pending(run, verdict)
    elif entry.state not in (*ACTIVE, *WAITING):
        _note_end(run, replace(submission, ended=entry.state), before)


def _note_end(run: RunDir, submission: Submission, before: RunState) -> None:
    """Record the end of a job; its own process may have been killed before it could."""
    why = ENDS.get(submission.ended, "")
    if not before.is_final:
        phase = Phase.STOPPED if submission.ended == "CANCELLED" else Phase.FAILED
        nodes = dict.fromkeys(run.read_record().cluster.names, phase)
        verdict = why or f"the Slurm job ended ({submission.ended}) before the run did"
        if submission.ended == "FAILED":
            verdict += f": {_last_words(run)}"
        write_state(run, RunState(phase, nodes, verdict=f"job {submission.job}: {verdict}"))
        run.add_event("ended", phase=phase, verdict=verdict)
    elif why and submission.ended != "FAILED" and before.phase is not Phase.FINISHED and not before.verdict:
        # FAILED adds nothing: the batch file fails because the run did not finish.
        write_state(run, replace(before, verdict=f"job {submission.job}: {why}"))
    write_submission(run, submission)


def _last_words(run: RunDir) -> str:
    """Return the last line that the batch file of a failed job wrote, and where it is."""
    log = log_file(run)
    try:
        lines = [line for line in _end_of(log).splitlines() if line.strip()]
    except FileNotFoundError:
        return f"its node cannot write {log}: keep the project on a disk that all nodes share (/tmp is none)"
    return f"{escape_controls(lines[-1].strip()[:300])} (see {log})" if lines else f"{log} is empty"


def note_cancelled(run: RunDir, submission: Submission) -> None:
    """Record that a job was cancelled before it had nodes."""
    _note_end(run, replace(submission, ended="CANCELLED"), RunState(Phase.PENDING, {}))


def log_file(run: RunDir) -> Path:
    """Return the file with the output of a run's job."""
    return run.root / "slurm.log"


def put_back(run: RunDir) -> str:
    """Return why a job that has run waits again, from the end of its log; "" if it has not run, or nothing says why."""
    try:
        text = _end_of(log_file(run))
    except FileNotFoundError:
        return ""
    found = list(PUT_BACK.finditer(text))
    return (found[-1]["ours"] or STEPD[found[-1]["stepd"]]) if found else ""


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END))
        return file.read().decode("utf-8", "replace")


def describe(job: int, entry: slurm.QueueEntry, before: str = "") -> str:
    """Return the state of a job in words; `before`: why its last start ended."""
    before = f"; its last start ended: {before}" if before else ""
    reason = f": {entry.reason}" if entry.reason not in ("", "None") else ""
    start = f"; expected to start at {entry.start}" if entry.start not in ("", "N/A") else ""
    return f"Slurm job {job} is {entry.state.lower()}{reason}{start}{before}"
