"""A job for a batch system: its check, its batch file, and its submission as a run that waits for nodes."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from clusterctl.backends import backend as backends
from clusterctl.backends.pods.submission import PodsJob
from clusterctl.backends.queue import Queue, Submission, write_waiting
from clusterctl.client.run import Run, runs_folder
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.inventory.cluster import Cluster
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.jobs.job import Job
from clusterctl.jobs.parts import notify
from clusterctl.jobs.parts.platforms import minutes_of
from clusterctl.jobs.parts.saving import with_grace
from clusterctl.jobs.run_folder import RunDir, new_run
from clusterctl.wire.fields import Key, closest_match

# Seconds for a checkpoint before the time limit; the early signal may come this much earlier.
GRAIN = 60


@dataclass(frozen=True)
class BatchJob:
    """A checked job, which nobody knows until it is submitted."""

    queue: Queue
    run: RunDir
    job: Job
    cluster: Cluster
    """Nodes like those that it asks for."""
    text: str
    """The batch file."""

    @classmethod
    def of(
        cls, name: str, file: Path, overrides: Sequence[str] = (), *, checks: bool = True, runs: Path
    ) -> BatchJob:
        """Check a job file for the batch system of this name; raise InputFaults with all errors."""
        if name not in backends.QUEUES:
            known = [*backends.QUEUES, backends.PODS]
            raise UsageError(f"{name!r} is no batch system", closest_match(name, known))
        queue = backends.named(name)
        assert isinstance(queue, Queue)
        job = jobs.load(file, overrides, partial(_faults, queue))
        if faults := _faults(queue, job):
            raise InputFaults(faults)
        cluster = queue.imagined(queue.options(job))
        # The node that runs the batch file calls `notify`, and checks it there.
        job = _with_times(queue, with_grace(job, job_check.check(replace(job, notify=""), cluster)))
        if faults := _faults(queue, job):
            raise InputFaults(faults)
        run = new_run(job.name, runs)
        command = [sys.executable, "-m", "clusterctl", "submit", "start", str(run.root)]
        text = queue.batch_file(run, job, [*command, *["--no-checks"] * (not checks)])
        return cls(queue, run, job, cluster, text)

    def test(self) -> str:
        """Return when and where the job could start, "" if that is not known; raise a UsageError if it cannot."""
        # The job inherits this environment.
        job_check.forwarded(self.job)
        return self.queue.test(self.text)

    def submit(self) -> int:
        """Submit the job, and record its run; return its number."""
        self.test()
        run = self.run
        write_waiting(run, self.job, self.cluster, f"submitted to {self.queue.title}")
        try:
            run.batch_file.write_text(self.text)
            number = self.queue.submit(self.text)
        except BaseException:
            # Nothing was submitted, so there is no run.
            shutil.rmtree(run.root)
            raise
        self.queue.note_submission(run, Submission(number, time.time()))
        return number


def submit(
    job: str | Path,
    to: str,
    *,
    overrides: Mapping[str, object] | None = None,
    checks: bool = True,
    runs: str | Path | None = None,
    kind: str = "job",
    image: str = "",
    name: str = "",
) -> Run:
    """Submit a job file to a batch system or as pods, as `clusterctl submit` does; return its waiting run.

    `to` is the name of the job's part for it; `overrides` changes keys of the job file. `kind`, `image` and `name` are
    for pods: the kind of the object, another image than that of the job, and the name of the objects.
    """
    changed = [f"{key}={value}" for key, value in (overrides or {}).items()]
    if to == backends.PODS:
        pods = PodsJob.of(Path(job), changed, kind=kind, image=image, name=name)
        return Run(pods.submit(runs_folder(runs)))
    batch = BatchJob.of(to, Path(job), changed, checks=checks, runs=runs_folder(runs))
    batch.submit()
    return Run(batch.run)


def _with_times(queue: Queue, job: Job) -> Job:
    """Return a job whose run saves early enough before the time limit, unless the job says when."""
    wanted = queue.options(job)
    given = job.document.value.get(queue.name) if job.document else None
    if isinstance(given, dict) and "signal" in given:
        return job
    return queue.with_options(job, replace(wanted, signal=max(wanted.signal, int(job.grace) + GRAIN)))


def _faults(queue: Queue, job: Job) -> list[Fault]:
    """Return the contradictions between the part of a batch system and the rest of a job."""
    part = queue.name
    if getattr(job, part, None) is None:
        return []
    wanted = queue.options(job)
    found: list[tuple[Key, str, str]] = []
    if wanted.signal and wanted.requeue and wanted.signal < job.grace:
        problem = f"{wanted.signal} s before the time limit are shorter than the {job.grace:g} s of `grace`"
        found.append(((part, "signal"), problem, f"signal: {int(job.grace) + GRAIN}"))
    if wanted.time and wanted.signal and minutes_of(wanted.time) * 60 <= wanted.signal + GRAIN:
        problem = f"a save {wanted.signal} s before the end (or {GRAIN} s earlier) leaves no time of {wanted.time!r}"
        found.append(((part, "time"), problem, "a longer time, or a smaller signal"))
    if job.nodes:
        problem = f"{queue.title} chooses the nodes of a submitted job"
        found.append((("nodes",), problem, queue.choose_nodes))
    if notify.masked(job.notify) != job.notify:
        found.append((("notify",), "this address would have to be in the record of the run", notify.REMEDY))
    document = job.document
    if document is None:
        return [Fault(job.source, problem, remedy) for _, problem, remedy in found]
    return [document.fault(path, problem, remedy) for path, problem, remedy in found]
