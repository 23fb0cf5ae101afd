"""The keys of a training's `save` part that the launcher needs: where checkpoints are, and on how many nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from clusterctl.storage.address import address_fault
from clusterctl.wire.fields import Key


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
