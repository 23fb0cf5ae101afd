"""Old runs taken away, here and on their nodes; never one that lives, or of which that can't be known."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl import contract
from clusterctl.errors import UsageError
from clusterctl.jobs.record import Abandoned, abandoned_of, cluster_of
from clusterctl.runs.state import FINAL

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connection, Connections

Connect = Callable[["Cluster"], AbstractContextManager["Connections"]]


UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds_of(text: str) -> float:
    """An age as a person writes it: `12h`, `30d`, `8w`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)\s*([smhdw]?)", text.strip().lower(), re.ASCII)
    if match is None:
        raise UsageError(f"--older-than {text[:40]}: no such time", "as in 12h, 30d or 8w")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class Pruned:
    """What became, or would become, of one run that was chosen."""

    run: str
    folder: str
    size: int
    nodes: tuple[str, ...] = ()
    """Where its folders are removed besides here."""
    kept: str = ""
    """Why it stays; empty for one that goes."""


@dataclass(frozen=True)
class Choice:
    """Which runs are old: those started longer ago than `older_than` seconds, but for the newest `keep`."""

    older_than: float | None = None
    keep: int | None = None

    def of(self, runs: Sequence[tuple[RunDir, float]], now: float) -> list[RunDir]:
        """Out of runs with the time each was started; a bound that is not given holds nothing back."""
        newest = sorted(runs, key=lambda one: one[1], reverse=True)
        if self.older_than is None and self.keep is None:
            raise UsageError("which runs are old?", "--older-than 30d, --keep 20, or both")
        rest = newest[self.keep or 0 :]
        return [run for run, started in rest if self.older_than is None or now - started > self.older_than]


def started(run: RunDir) -> float:
    """When the run's last attempt was started."""
    return run.record.stat().st_mtime


def prune(
    runs: Sequence[RunDir],
    connect: Connect,
    *,
    here_only: bool = False,
    dry_run: bool = False,
    on_each: Callable[[Pruned], None] = lambda one: None,
) -> list[Pruned]:
    """Remove these runs; those that live, or can't be asked, are kept and say why. A dry run only asks."""
    done = []
    for cluster, those in _by_cluster(runs):
        if here_only or cluster is None:
            done += [_one(run, None, here_only, dry_run, on_each) for run in those]
            continue
        with connect(cluster) as connections:
            done += [_one(run, connections, False, dry_run, on_each) for run in those]
    return done


def _by_cluster(runs: Sequence[RunDir]) -> Iterator[tuple[Cluster | None, list[RunDir]]]:
    """Runs of the same nodes share their connections; None for those whose record can't be read."""
    groups: dict[str, list[RunDir]] = {}
    for run in runs:
        try:
            key = json.dumps(run.read_record()["cluster"], sort_keys=True)
        except (UsageError, KeyError):
            key = ""
        groups.setdefault(key, []).append(run)
    for key, those in groups.items():
        yield (cluster_of(those[0]) if key else None), those


def _one(
    run: RunDir,
    connections: Connections | None,
    here_only: bool,
    dry_run: bool,
    on_each: Callable[[Pruned], None],
) -> Pruned:
    size = tree_size(run)
    names: tuple[str, ...] = ()
    # Nobody resumes it meanwhile.
    with run.hold(0.0) as ours:
        if not ours:
            result = Pruned(run.run_id, str(run.root), size, kept="it runs: a process here looks after it")
        else:
            reason, names = _stays(run, connections, here_only)
            reason = reason or ("" if dry_run else _removed(run, connections))
            result = Pruned(run.run_id, str(run.root), size, names, reason)
    on_each(result)
    return result


def _stays(run: RunDir, connections: Connections | None, here_only: bool) -> tuple[str, tuple[str, ...]]:
    """Why a run must stay, or where else it is."""
    try:
        phase = run.read_state().get("phase")
        if connections is not None:
            return _alive(run, connections), tuple(one.node.name for one in _places(run))
    except (UsageError, KeyError) as problem:
        return f"its record can't be read: {problem}", ()
    if here_only:
        return ("" if phase in FINAL else "when last seen it had not ended, and no node is asked"), ()
    return "its record can't be read", ()


def _places(run: RunDir) -> list[Abandoned]:
    """Every node with a part of the run, those that were given up in the middle of it too."""
    record = run.read_record()
    there = [
        Abandoned(node, record["run_dirs"][node.name], record["attempt"]) for node in cluster_of(run).nodes
    ]
    return [*there, *abandoned_of(run)]


def _alive(run: RunDir, connections: Connections) -> str:
    """Why a run counts as living, by its nodes' own words."""
    places = {one.node.name: one for one in _places(run)}

    def ask(node: Node, link: Connection) -> int:
        one = places[node.name]
        marker = {contract.RUN_ID: run.run_id, contract.NODE: node.name}
        supervisor = link.call("state", {"run_dir": one.run_dir, "attempt": one.attempt})["supervisor"]
        return len(link.call("count", {"marker": marker})["pids"]) + bool(supervisor and supervisor["alive"])

    for outcome in connections.on_each([one.node for one in places.values()], ask):
        name = outcome.node.name
        if outcome.error is not None:
            reason = getattr(outcome.error, "reason", outcome.error.message)
            return f"{name} can't be asked whether it still runs there: {reason}"
        if outcome.value:
            return f"it runs on {name}"
    return ""


def _removed(run: RunDir, connections: Connections | None) -> str:
    """Take a run away, its nodes first: what is left after a failure can still be named, and pruned again."""
    if connections is not None:
        places = {one.node.name: one for one in _places(run)}

        def remove(node: Node, link: Connection) -> dict[str, Any]:
            return link.call("remove", {"path": places[node.name].run_dir, "empty_above": True})

        outcomes = connections.on_each([one.node for one in places.values()], remove)
        failed = [one.error.message for one in outcomes if one.error is not None]
        if failed:
            return failed[0]
    try:
        shutil.rmtree(run.root)
    except OSError as problem:
        return f"{run.root}: {problem.strerror or problem}"
    return ""


def tree_size(run: RunDir) -> int:
    """The bytes of a run's files here."""
    total = 0
    for folder, _, names in os.walk(run.root):
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
