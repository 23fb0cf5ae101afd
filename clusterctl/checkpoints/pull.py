"""Fetch a checkpoint from the nodes that have its files into one folder of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from clusterctl.agent.files import checkpoints as on_disk
from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointCopy, Health
from clusterctl.checkpoints.holder import ThisMachine
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.transfer.push import Progress
from clusterctl.transport.fanout import on_each, raise_failures
from clusterctl.wire.saved import MANIFEST, Manifest


@dataclass(frozen=True)
class Fetch:
    """What is fetched from one machine."""

    holding: CheckpointCopy
    names: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Pull:
    """The plan of a pull."""

    checkpoint: Checkpoint
    dest: Path
    fetches: tuple[Fetch, ...]
    present: tuple[str, ...]
    """Files that are in `dest` already; they are verified too."""

    @property
    def bytes(self) -> int:
        return sum(fetch.bytes for fetch in self.fetches)

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.checkpoint.step,
            "folder": str(self.dest),
            "bytes": self.bytes,
            "present": len(self.present),
            "from": {fetch.holding.holder.name: list(fetch.names) for fetch in self.fetches},
        }


def plan_pull(checkpoint: Checkpoint, manifest: Manifest, dest: Path) -> Pull:
    """Return the machine that sends each file: of several, the one that sends fewest bytes so far."""
    if checkpoint.health is not Health.COMPLETE:
        problem = (
            f"{checkpoint.name} is {checkpoint.health.value}: {checkpoint.missing} of its files are missing"
        )
        raise UsageError(problem, "choose another --step; see `clusterctl checkpoint list`")
    _check_dest(dest, {*manifest.files, MANIFEST})
    own = ThisMachine().entry(str(dest)) if (dest / MANIFEST).exists() else None
    if own is not None and own.digest != checkpoint.digest:
        raise UsageError(f"{dest}: another checkpoint is there", "name another folder with -o, or remove it")
    present = set(own.have) if own else set()
    sums = {holding.holder.name: 0 for holding in checkpoint.holdings}
    names: dict[str, list[str]] = {}
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    for file in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if file not in present:
            holders = [holding.holder.name for holding in checkpoint.holders_of(file)]
            chosen = min(holders, key=lambda name: sums[name])
            sums[chosen] += sizes[file]
            names.setdefault(chosen, []).append(file)
    by_name = {holding.holder.name: holding for holding in checkpoint.holdings}
    fetches = tuple(Fetch(by_name[name], tuple(sorted(files)), sums[name]) for name, files in names.items())
    return Pull(checkpoint, dest, fetches, tuple(sorted(present)))


def _check_dest(dest: Path, names: Collection[str]) -> None:
    """Refuse a folder with other files, or one that cannot be written, before anything is fetched."""
    hint = "name a new folder with -o"
    if dest.exists() and not dest.is_dir():
        raise UsageError(f"{dest}: a file, not a folder", hint)
    if dest.is_dir() and not (dest / MANIFEST).exists():
        other = sorted(path.name for path in dest.iterdir() if path.name not in names)
        if other:
            raise UsageError(f"{dest}: contains other files, such as {other[0]}", hint)
    above = next(parent for parent in dest.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(
            f"{above}: {'cannot be written' if above.is_dir() else 'a file, not a folder'}", hint
        )


def pull(plan: Pull, progress_of: Callable[[str], Progress]) -> None:
    """Fetch, verify every byte, and put the folder in place; an interrupted pull is continued by the next one."""
    aside = plan.dest.parent / f".{plan.dest.name}.incoming"
    fetches = {fetch.holding.holder.name: fetch for fetch in plan.fetches}
    outcomes = on_each(
        [fetch.holding.holder.node for fetch in plan.fetches],
        lambda node: _fetch(fetches[node.name], aside / node.name, progress_of(node.name)),
    )
    raise_failures(outcomes)
    whole = aside / "whole"
    whole.mkdir(parents=True, exist_ok=True)
    for fetch in plan.fetches:
        for name in fetch.names:
            os.replace(aside / fetch.holding.holder.name / name, whole / name)
    for name in plan.present:
        if not (whole / name).exists():
            os.link(plan.dest / name, whole / name)
    (whole / MANIFEST).write_bytes(plan.checkpoint.manifest_content())
    _verify(whole)
    _put_in_place(whole, plan.dest)
    shutil.rmtree(aside, ignore_errors=True)


def _fetch(fetch: Fetch, dest: Path, progress: Progress) -> None:
    holder, path = fetch.holding.holder, fetch.holding.entry.path
    with holder.held([path]):
        holder.fetch(path, fetch.names, dest, progress)


def _verify(folder: Path) -> None:
    result = on_disk.verify(str(folder), lambda done: None)
    faults = [entry["fault"] for entry in result["faults"]]
    faults += [check["fault"] for check in result["files"].values() if check["fault"]]
    if faults:
        raise WorkFailed(
            "\n".join(["the checkpoint is damaged; it was not put in place", *faults]),
            "clusterctl checkpoint verify shows which node has the damaged file",
        )


def _put_in_place(whole: Path, dest: Path) -> None:
    if not dest.exists():
        os.rename(whole, dest)
        return
    for path in sorted(whole.iterdir(), key=lambda path: path.name == MANIFEST):
        os.replace(path, dest / path.name)
