"""What the launcher must know of a training's `save` part: where checkpoints are, and on how many nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.document import Key

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job


@dataclass(frozen=True)
class Saving:
    """Two keys of `train.save`; the trainer checks all others."""

    dir: str = ""
    """A folder on a disk that all nodes share; "" if each node has its own checkpoints."""
    copies: int = 1
    """How many nodes shall have each file."""


def saving_of(job: Job) -> Saving:
    """Return the values of a job; wrong ones, which the trainer reports, count as not given."""
    save = (job.train or {}).get("save")
    if not isinstance(save, dict):
        return Saving()
    folder, copies = save.get("dir"), save.get("copies")
    return Saving(folder.rstrip("/") if isinstance(folder, str) else "", copies if type(copies) is int else 1)


def saving_faults(job: Job, nodes: int) -> Iterator[tuple[Key, str, str]]:
    """Yield key, problem and remedy of what does not fit the nodes."""
    saving = saving_of(job)
    if "{" in saving.dir:
        remedy = "write one path that is the same on all nodes"
        yield ("train", "save", "dir"), f"{saving.dir!r} has a placeholder", remedy
    if saving.copies > nodes > 0:
        problem = f"{saving.copies} copies need as many nodes, and the run has {nodes}"
        yield ("train", "save", "copies"), problem, f"copies: {nodes}, or more nodes"
