"""A batch system: its jobs wait in a queue, get nodes, and one command there starts and controls the run.

What was submitted, and the state that the batch system reports. Each batch system fills in its own words and programs.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from clusterctl.backends.backend import Backend, Ending
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job, devices_on
from clusterctl.jobs.parts.platforms import QueueOptions
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT, RunRecord
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.state import RunState, read_state, write_state
from clusterctl.text import escape_controls
from clusterctl.wire.typed_json import BadValue, decode, encode

# Seconds in which a batch system puts a job back into its queue.
SETTLE = 1.0
# Seconds after the end of a run in which its job ends.
LEAVE = 10.0
# Bytes at the end of the log that are searched.
LOG_END = 16_384


@dataclass(frozen=True)
class Submission:
    """The job of a run, in a file of its folder."""

    job: int
    submitted: float
    ended: str = ""
    """The batch system's word for the end of the job; "" until it is known."""


@dataclass(frozen=True)
class Entry:
    """A job as its batch system knows it now."""

    state: str
    """The batch system's word, such as PENDING."""
    reason: str = ""
    """Why it waits, or why it ended."""
    nodes: str = ""
    start: str = ""
    """When it is expected to start, or has started."""


class Queue(Backend):
    """What all batch systems share."""

    keeps_nodes = False
    resubmits = True
    part: type[QueueOptions]
    """The part of a job that says what to ask for."""
    waiting: tuple[str, ...]
    """The words for a job that waits, and for one that has nodes."""
    active: tuple[str, ...]
    ends: ClassVar[Mapping[str, str]]
    """How a job ended, for people, by the word of the batch system."""
    says: ClassVar[Mapping[str, str]] = {}
    """What its words for a waiting job mean, where they are not English."""
    choose_nodes: str
    """The keys of its part that choose nodes, as a remedy."""
    cancelled: str
    """The word for a job that was cancelled, and for one whose batch file failed."""
    failed: str

    def options(self, job: Job) -> QueueOptions:
        """Return the part of a job that says what to ask for."""
        found: QueueOptions | None = getattr(job, self.name, None)
        return found or self.part()

    def with_options(self, job: Job, options: QueueOptions) -> Job:
        """Return the job with another part; a batch system without keys of its own has none."""
        changed: Any = {self.name: options}
        return replace(job, **changed) if hasattr(job, self.name) else job

    @abstractmethod
    def imagined(self, options: Any) -> Cluster:
        """Return nodes like those that a job asks for, to check it before it has any."""

    @abstractmethod
    def header(self, name: str, options: Any, log: str) -> list[str]:
        """Return the lines of a batch file that say what to ask for; `log` receives its output."""

    def test(self, batch_file: str) -> str:
        """Return when and where a job could start; raise a UsageError if it never could. It is not submitted.

        Return "" if the batch system checks a job only when it is submitted.
        """
        return ""

    @abstractmethod
    def submit(self, batch_file: str) -> int:
        """Submit a batch file; return the number of the job."""

    @abstractmethod
    def entries(self) -> Mapping[int, Entry]:
        """Return the jobs of this user by number: those that wait or run, and perhaps those that ended lately."""

    @abstractmethod
    def ended(self, job: int) -> Entry:
        """Return a job that has left the queue; its state is UNKNOWN if nobody knows it any more."""

    @abstractmethod
    def cancel(self, job: int) -> None:
        """Cancel a job."""

    @abstractmethod
    def requeue(self, run: RunDir, job: str) -> int:
        """Put the running job around this process back into the queue; return the exit code that its file needs."""

    def preparation(self, options: Any) -> list[str]:
        """Return the shell lines at the beginning of a batch file."""
        return []

    def saves_after(self, options: Any) -> float | None:
        """Return after how many seconds of a job the run must save; None if the batch system sends a signal."""
        return None

    def end_of(self, job: str) -> str:
        """Return the word for the end of a job that is ending; "" if the batch system does not say."""
        return ""

    def starts(self, variables: Mapping[str, str]) -> int:
        """Return how often the job around this process was put back."""
        return 0

    def put_back(self, text: str) -> str:
        """Return why a job that has run waits again, from the end of its log; "" if nothing says why."""
        return ""

    def batch_file(self, run: RunDir, job: Job, command: Sequence[str]) -> str:
        """Return a batch file that runs `command` on the first node of the job."""
        options = self.options(job)
        body = ["set -eu", *self.preparation(options), *options.setup, f"exec {shlex.join(command)}"]
        return (
            "\n".join(["#!/bin/bash", *self.header(job.name, options, str(self.log(run))), "", *body]) + "\n"
        )

    def log(self, run: RunDir) -> Path:
        """Return the file with the output of a run's job."""
        return run.root / f"{self.name}.log"

    def submission_of(self, run: RunDir) -> Submission | None:
        """Return what was submitted for a run; None if nothing was yet, or the file is damaged."""
        try:
            return decode(Submission, run.read_json(run.root / self.record))
        except (BadValue, UsageError):
            return None

    def note_submission(self, run: RunDir, submission: Submission) -> None:
        """Record what was submitted for a run."""
        run.write_json(run.root / self.record, encode(submission))

    def submit_again(self, run: RunDir, job: Job) -> int:
        deadline = time.monotonic() + LEAVE if run.phase().is_final else 0.0
        while not ((before := self.submission_of(run)) and before.ended) and time.monotonic() < deadline:
            time.sleep(SETTLE)
            self.refresh([run])
        if before is None or not before.ended:
            problem = f"the {self.title} job of {run.run_id} has not ended"
            raise UsageError(problem, f"clusterctl status {run.run_id}")
        text = run.batch_file.read_text()
        self.test(text)
        run.write_record(replace(run.read_record(), job=job))
        run.stop_asked.unlink(missing_ok=True)
        number = self.submit(text)
        write_pending(run, f"submitted to {self.title} again")
        self.note_submission(run, Submission(number, time.time()))
        run.add_event("note", text=f"submitted again as {self.title} job {number}")
        return number

    def refresh(self, runs: Sequence[RunDir]) -> None:
        known = [(run, found) for run in runs if (found := self.submission_of(run)) and not found.ended]
        queue = self.entries() if known else {}
        for run, submission in known:
            with contextlib.suppress(ClusterctlError):
                entry = self._entry(queue, submission.job)
                if entry.state not in (*self.active, *self.waiting) and not run.phase().is_final:
                    # A job that is being put back into the queue looks for a moment as if it had ended.
                    time.sleep(SETTLE)
                    entry = self._entry(self.entries(), submission.job)
                self._note(run, submission, entry)

    def _entry(self, queue: Mapping[int, Entry], job: int) -> Entry:
        return queue.get(job) or self.ended(job)

    def _note(self, run: RunDir, submission: Submission, entry: Entry) -> None:
        before = read_state(run) or RunState(Phase.RUNNING, {})
        if entry.state in self.waiting:
            if run.controller() is not None:
                # The answer came late: the job has started meanwhile.
                return
            verdict = self._describe(submission.job, entry, self.put_back(end_of(self.log(run)) or ""))
            if (before.phase, before.verdict) != (Phase.PENDING, verdict):
                write_pending(run, verdict)
        elif entry.state not in self.active:
            self._note_end(run, replace(submission, ended=entry.state), before)

    def _describe(self, job: int, entry: Entry, before: str) -> str:
        """Return the state of a waiting job in words; `before`: why its last start ended."""
        before = f"; its last start ended: {before}" if before else ""
        reason = f": {entry.reason}" if entry.reason not in ("", "None") else ""
        start = f"; expected to start at {entry.start}" if entry.start not in ("", "N/A") else ""
        state = self.says.get(entry.state, entry.state.lower())
        return f"{self.title} job {job} is {state}{reason}{start}{before}"

    def _note_end(self, run: RunDir, submission: Submission, before: RunState) -> None:
        """Record the end of a job; its own process may have been killed before it could."""
        why = self.ends.get(submission.ended, "")
        if not before.is_final:
            phase = Phase.STOPPED if submission.ended == self.cancelled else Phase.FAILED
            nodes = dict.fromkeys(run.read_record().cluster.names, phase)
            verdict = why or f"the {self.title} job ended ({submission.ended}) before the run did"
            if submission.ended == self.failed:
                verdict += f": {self._last_words(run)}"
            write_state(run, RunState(phase, nodes, verdict=f"job {submission.job}: {verdict}"))
            run.add_event("ended", phase=phase, verdict=verdict)
        elif (
            why
            and submission.ended != self.failed
            and before.phase is not Phase.FINISHED
            and not before.verdict
        ):
            # A failed batch file adds nothing: it fails because the run did not finish.
            write_state(run, replace(before, verdict=f"job {submission.job}: {why}"))
        self.note_submission(run, submission)

    def _last_words(self, run: RunDir) -> str:
        """Return the last line that the batch file of a failed job wrote, and where it is."""
        log = self.log(run)
        text = end_of(log)
        if text is None:
            return (
                f"its node cannot write {log}: keep the project on a disk that all nodes share (/tmp is none)"
            )
        lines = [line for line in text.splitlines() if line.strip()]
        return f"{escape_controls(lines[-1].strip()[:300])} (see {log})" if lines else f"{log} is empty"

    def ending(self, run: RunDir, grace: float | None) -> Ending | None:
        if run.phase() is not Phase.PENDING:
            return None
        waiting = self.submission_of(run)
        if waiting is None:
            raise UsageError(f"{run.run_id} is being submitted", "try again in a second")
        job = waiting.job

        def end() -> tuple[str, None]:
            self.cancel(job)
            self._note_end(run, replace(waiting, ended=self.cancelled), RunState(Phase.PENDING, {}))
            return f"{self.title} job {job} was cancelled before it started", None

        return Ending(f"cancel {self.title} job {job}, which has not started", end)


def imagined_nodes(name: str, count: int, kind: str, devices: int) -> Cluster:
    """Return nodes like those that a job asks for, before it has any."""
    names = [f"{name}{number}" for number in range(1, count + 1)]
    nodes = [
        Node(each, each, each, server_id=each, kind=kind, devices=tuple(range(devices))) for each in names
    ]
    return Cluster(name, tuple(nodes), source=f"the job's {name} part")


def write_waiting(run: RunDir, job: Job, cluster: Cluster, verdict: str) -> None:
    """Record a run whose nodes are not known yet, and why; attempt 0 has never started."""
    ranks: dict[str, tuple[int, ...]] = {}
    devices = {node.name: devices_on(job, node) for node in cluster.nodes}
    for name, own in devices.items():
        first = sum(map(len, ranks.values()))
        ranks[name] = tuple(range(first, first + len(own)))
    nothing = dict.fromkeys(cluster.names, "")
    record = RunRecord(run.run_id, 0, job, cluster, nothing, ranks, devices, time.time(), format=FORMAT)
    run.write_record(record)
    write_pending(run, verdict)


def write_pending(run: RunDir, verdict: str) -> None:
    """Record that a run waits for nodes, and why."""
    write_state(run, RunState(Phase.PENDING, {}, verdict=verdict))


def end_of(log: Path) -> str | None:
    """Return the end of a log; None if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_END))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return None
