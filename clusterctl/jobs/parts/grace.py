"""The key `grace`, the time for a last checkpoint: of a training, it follows from the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from clusterctl.jobs.job import Job
from clusterctl.text import duration
from clusterctl.wire.fields import Key
from clusterctl.wire.train_summary import TrainSummary

# What a derived grace has beyond the planned times, which are estimates: this many times them.
MARGIN = 1.5
# GB/s of an upload to an object store, where the plan knows no network.
UPLOAD_GBYTES = 0.1


def last_save_seconds(summary: TrainSummary) -> float:
    """Return the planned seconds from a request to stop to the last checkpoint: the rest of a step, and a save."""
    return summary.time.seconds + summary.checkpoints.seconds


def upload_seconds(summary: TrainSummary, to: str) -> float:
    """Return the planned seconds of the upload of a node's part of a checkpoint to a store; 0 without one."""
    speed = min(summary.hardware.net_gbytes or UPLOAD_GBYTES, UPLOAD_GBYTES)
    return summary.checkpoints.node_bytes / (speed * 1e9) if to else 0.0


def names_grace(job: Job) -> bool:
    """Return whether the job sets `grace` itself."""
    return job.document is not None and isinstance(job.document.value, dict) and "grace" in job.document.value


def with_grace(job: Job, summary: TrainSummary | None) -> Job:
    """Return a training with a grace that lets it save, unless the job sets its own."""
    if summary is None or names_grace(job):
        return job
    return replace(job, grace=max(job.grace, float(math.ceil(MARGIN * last_save_seconds(summary)))))


def grace_problems(job: Job, summary: TrainSummary | None) -> Iterator[tuple[Key, str, str]]:
    """Yield the problem of a grace that is too short for a last checkpoint; 0 says that none is wanted."""
    if summary is None or not job.grace or not names_grace(job) or job.grace >= last_save_seconds(summary):
        return
    step, save = duration(summary.time.seconds), duration(summary.checkpoints.seconds)
    problem = f"{job.grace:g} s are shorter than the step and the save after a stop, about {step} and {save}"
    enough = math.ceil(MARGIN * last_save_seconds(summary))
    yield (
        ("grace",),
        problem,
        f"grace: {enough}, or leave it out: it follows from the plan; 0: no last checkpoint",
    )
