"""The keys of a training's `save` part that the launcher needs, and the `grace` in which a save ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from clusterctl.jobs.job import Job
from clusterctl.storage.address import address_fault
from clusterctl.text import duration
from clusterctl.wire.fields import Key
from clusterctl.wire.train_summary import TrainSummary


@dataclass(frozen=True)
class Saving:
    """Three keys of `train.save`; the trainer checks all others."""

    dir: str = ""
    """A folder on a disk that all nodes share; "" if each node has its own checkpoints."""
    copies: int = 1
    """Number of nodes that have each file."""
    to: str = ""
    """The object store that gets each checkpoint; "" for none."""


def saving_of(train: Mapping[str, object] | None) -> Saving:
    """Return the values in a job's train part; wrong values, which the trainer reports, count as missing."""
    save = (train or {}).get("save")
    if not isinstance(save, dict):
        return Saving()
    folder, copies, to = save.get("dir"), save.get("copies"), save.get("to")
    return Saving(
        folder.rstrip("/") if isinstance(folder, str) else "",
        copies if type(copies) is int else 1,
        to if isinstance(to, str) else "",
    )


def saving_faults(train: Mapping[str, object] | None, nodes: int) -> Iterator[tuple[Key, str, str]]:
    """Yield key, problem and remedy of each value that does not fit the nodes."""
    saving = saving_of(train)
    if "{" in saving.dir:
        remedy = "write one path that is the same on all nodes"
        yield ("train", "save", "dir"), f"{saving.dir!r} has a placeholder", remedy
    if saving.to and (fault := address_fault(saving.to))[0]:
        yield ("train", "save", "to"), *fault
    if saving.to and saving.dir:
        yield ("train", "save", "to"), "checkpoints are on a shared disk (dir) too", "leave out `dir` or `to`"
    if saving.copies > nodes > 0:
        problem = f"{saving.copies} copies need as many nodes, and the run has {nodes}"
        yield ("train", "save", "copies"), problem, f"copies: {nodes}, or more nodes"


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
