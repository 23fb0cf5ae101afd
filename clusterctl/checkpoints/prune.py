"""Remove old checkpoints of a run or folder, on every machine that has files of them."""

from __future__ import annotations

from dataclasses import dataclass

from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointList, Health
from clusterctl.errors import ClusterctlError
from clusterctl.wire.saved import OLD


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept, as in `train.save.keep`."""

    last: int = 1
    every: int = 0
    best: int = 0


@dataclass(frozen=True)
class Pruned:
    """A checkpoint that was removed, or would be, or the reason why it is kept."""

    checkpoint: Checkpoint
    bytes: int = 0
    kept: str = ""

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.checkpoint.step,
            "name": self.checkpoint.name,
            "on": list(self.checkpoint.nodes),
            "bytes": self.bytes,
            "kept": self.kept,
        }


def reasons(found: CheckpointList, keep: Keep) -> dict[str, str]:
    """Return by name why a checkpoint is kept, or "" if it is to be removed.

    The newest complete checkpoint, and the newest from which training can resume, are always kept, and so are all newer
    ones, which may still be being written. Without a complete checkpoint, all are kept.
    """
    complete = [item for item in found.checkpoints if item.health is Health.COMPLETE]
    if not complete:
        return {item.name: "no checkpoint is complete" for item in found.checkpoints}
    whole = [item for item in complete if OLD not in item.name]
    result = {item.name: "" for item in found.checkpoints}
    for item in found.checkpoints:
        if item.step > complete[0].step:
            result[item.name] = "newer than the newest complete one"
        elif keep.every and item.step % keep.every == 0 and item in whole:
            result[item.name] = f"its step is a multiple of {keep.every}"
    measured = [item for item in whole if item.facts.eval_loss is not None]
    for item in sorted(measured, key=lambda item: item.facts.eval_loss or 0.0)[: keep.best]:
        result[item.name] = f"one of the {keep.best} best"
    for item in whole[: keep.last]:
        result[item.name] = f"one of the last {keep.last}"
    resumable = next((item for item in complete if item.is_resumable), complete[0])
    result[resumable.name] = "the newest from which training can resume"
    result[complete[0].name] = "the newest complete one"
    return result


def prune(found: CheckpointList, keep: Keep, *, dry_run: bool) -> list[Pruned]:
    """Remove the checkpoints that `keep` does not name; return the result for each."""
    why = reasons(found, keep)
    return [
        Pruned(item, kept=why[item.name]) if why[item.name] else _remove(item, dry_run=dry_run)
        for item in found.checkpoints
    ]


def _remove(checkpoint: Checkpoint, *, dry_run: bool) -> Pruned:
    """Remove a checkpoint on all machines, or on none if one of them uses it."""
    total = 0
    for check in (True, False):
        if dry_run and not check:
            break
        total = 0
        for holding in checkpoint.holdings:
            try:
                answer = holding.holder.remove(holding.entry.path, holding.entry.digest, check=check)
            except ClusterctlError as error:
                return Pruned(checkpoint, total, error.message)
            if answer.kept:
                return Pruned(checkpoint, total, f"{holding.holder.name}: {answer.kept}")
            total += answer.bytes
    return Pruned(checkpoint, total)
