"""Remove old runs on this machine and on their nodes, except runs that are active, or may be on a node that does not
answer.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.jobs.job import work_folder
from clusterctl.jobs.record import Abandoned

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections, Outcome

Connect = Callable[["Cluster"], AbstractContextManager["Connections"]]


RUNS_HERE = "it runs: a process here is its controller"
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds_of(text: str) -> float:
    """Return the seconds of an age such as `12h`, `30d` or `8w`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)\s*([smhdw]?)", text.strip().lower(), re.ASCII)
    if match is None:
        raise UsageError(f"--older-than {text[:40]}: not a length of time", "for example 12h, 30d or 8w")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class Pruned:
    """The result for one chosen run: what was, or would be, removed."""

    run: str
    folder: str
    size: int
    nodes: tuple[str, ...] = ()
    """The nodes whose folders of the run are removed too."""
    kept: str = ""
    """Why the run is kept; empty if it is removed."""


@dataclass(frozen=True)
class Choice:
    """Which runs are old: those started more than `older_than` seconds ago, except the newest `keep`."""

    older_than: float | None = None
    keep: int | None = None

    def of(self, runs: Sequence[tuple[RunDir, float]], now: float) -> list[RunDir]:
        """Return the old ones of some runs, each given with the time of its start."""
        newest = sorted(runs, key=lambda entry: entry[1], reverse=True)
        if self.older_than is None and self.keep is None:
            raise UsageError("say which runs are old", "--older-than 30d, --keep 20, or both")
        rest = newest[self.keep or 0 :]
        return [run for run, started in rest if self.older_than is None or now - started > self.older_than]


def started(run: RunDir) -> float:
    """Return when the run's last attempt was started."""
    return run.record.stat().st_mtime


def prune(
    runs: Sequence[RunDir],
    connect: Connect,
    *,
    here_only: bool = False,
    dry_run: bool = False,
    on_each: Callable[[Pruned], None] = lambda pruned: None,
    on_store: Callable[[str, Store], None] = lambda node, store: None,
) -> list[Pruned]:
    """Remove runs and return what was done with each. Runs that may still run are kept. A dry run removes nothing.

    Then remove from the store of each node the code and data that no run there uses; `on_store` is called with them.
    """
    done = []
    for cluster, group in _by_cluster(runs):
        if here_only or cluster is None:
            done += [_prune_here(run, dry_run, on_each) for run in group]
            continue
        with connect(cluster) as connections:
            survey = _Survey(connections, group)
            for run in group:
                done.append(_prune_everywhere(run, survey, connections, dry_run, on_each))
            gone = {pruned.run for pruned in done if not pruned.kept}
            shares = [entry for run in group if run.run_id in gone for entry in survey.shares[run]]
            for outcome in _collect_stores(shares, connections, dry_run):
                if outcome.ok:
                    on_store(outcome.node.name, outcome.get())
    return done


@dataclass(frozen=True)
class Store:
    """What was, or would be, removed from the store of a node: names such as `code/<hash>`, and their bytes."""

    names: tuple[str, ...]
    size: int


def _collect_stores(
    shares: Sequence[Abandoned], connections: Connections, dry_run: bool
) -> list[Outcome[Store]]:
    """Remove from the nodes' stores what no run uses; `shares` are the nodes and folders of the removed runs."""
    folders: dict[str, list[str]] = {}
    for entry in shares:
        folders.setdefault(entry.node.name, []).append(entry.run_dir)
    nodes = {entry.node.name: entry.node for entry in shares}

    def collect(node: Node, link: Connection) -> Store:
        return link.ask(Store, "collect_store", {"look": dry_run, "without": folders[node.name]})

    return connections.on_each(list(nodes.values()), collect)


Shares = dict["RunDir", list[Abandoned]]
"""By run every node with a part of it, including those that it gave up."""


def _by_cluster(runs: Sequence[RunDir]) -> Iterator[tuple[Cluster | None, Shares]]:
    """Yield runs of the same nodes together, because they share connections; None for runs without a readable
    record.
    """
    groups: dict[int, tuple[Cluster | None, Shares]] = {}
    known: dict[str, Cluster] = {}
    for run in runs:
        try:
            placement, cluster = run.read_placement(known)
        except UsageError:
            groups.setdefault(0, (None, {}))[1][run] = []
            continue
        shares = [Abandoned(node, placement.run_dirs[node.name], placement.attempt) for node in cluster.nodes]
        lost = [entry for entry in placement.abandoned if entry not in shares]
        groups.setdefault(id(cluster), (cluster, {}))[1][run] = [*shares, *lost]
    yield from groups.values()


@contextmanager
def _held(run: RunDir, dry_run: bool) -> Iterator[bool]:
    """Hold the run's lock against a resume; yield False if the run has a controller. A dry run writes nothing."""
    if dry_run:
        yield run.controller() is None
    else:
        with run.hold(0.0) as ours:
            yield ours


def _prune_here(run: RunDir, dry_run: bool, on_each: Callable[[Pruned], None]) -> Pruned:
    """Remove a run's folder here without asking any node, if it has ended."""
    size = tree_size(run)
    with _held(run, dry_run) as ours:
        reason = "" if ours else RUNS_HERE
        if ours and not _has_record(run):
            reason = "its record can't be read"
        elif ours and not run.phase().is_final:
            reason = "it had not ended when it was last seen, and no node is asked"
        reason = reason or ("" if dry_run else _remove_folder(run))
    result = Pruned(run.run_id, str(run.root), size, kept=reason)
    on_each(result)
    return result


def _has_record(run: RunDir) -> bool:
    try:
        return bool(run.read_record())
    except UsageError:
        return False


def _prune_everywhere(
    run: RunDir, survey: _Survey, connections: Connections, dry_run: bool, on_each: Callable[[Pruned], None]
) -> Pruned:
    """Remove a run from its nodes and from this machine, if it is active nowhere."""
    size, names = tree_size(run), tuple(entry.node.name for entry in survey.shares[run])
    with _held(run, dry_run) as ours:
        reason = survey.why_alive(run) if ours else RUNS_HERE
        if not reason and not dry_run:
            reason = _remove_from_nodes(survey.shares[run], connections) or _remove_folder(run)
    result = Pruned(run.run_id, str(run.root), size, () if reason == RUNS_HERE else names, reason)
    on_each(result)
    return result


@dataclass(frozen=True)
class Alive:
    """A node's answer: whether processes of each attempt that it was asked about are alive."""

    alive: tuple[bool, ...]


class _Survey:
    """What the nodes report about some runs; each node is asked once about all of them."""

    def __init__(self, connections: Connections, shares: Shares) -> None:
        self.shares = shares
        nodes: dict[str, Node] = {}
        by_node: dict[str, list[tuple[RunDir, Abandoned]]] = {}
        for run, entries in shares.items():
            for entry in entries:
                nodes[entry.node.name] = entry.node
                by_node.setdefault(entry.node.name, []).append((run, entry))

        def ask(node: Node, link: Connection) -> tuple[bool, ...]:
            attempts = [
                {"run_dir": entry.run_dir, "attempt": entry.attempt, "run_id": run.run_id, "node": node.name}
                for run, entry in by_node[node.name]
            ]
            return link.ask(Alive, "alive", {"attempts": attempts}).alive

        self._alive: dict[tuple[str, str], bool] = {}
        self._errors: dict[str, str] = {}
        for outcome in connections.on_each(list(nodes.values()), ask):
            name = outcome.node.name
            if outcome.error is not None:
                self._errors[name] = getattr(outcome.error, "reason", outcome.error.message)
                continue
            for (run, _), alive in zip(by_node[name], outcome.get(), strict=True):
                key = (run.run_id, name)
                self._alive[key] = alive or self._alive.get(key, False)

    def why_alive(self, run: RunDir) -> str:
        """Return why a run counts as active; empty if it is active nowhere."""
        for entry in self.shares[run]:
            name = entry.node.name
            if name in self._errors:
                return f"{name} can't be asked whether it still runs there: {self._errors[name]}"
            if self._alive[run.run_id, name]:
                return f"it runs on {name}"
        return ""


def _remove_from_nodes(shares: Sequence[Abandoned], connections: Connections) -> str:
    """Remove a run from its nodes; return the first error. The local record stays until all nodes have removed it."""
    folders = {entry.node.name: entry.run_dir for entry in shares}

    def remove(node: Node, link: Connection) -> None:
        link.call("remove", {"path": work_folder(folders[node.name])})
        link.call("remove", {"path": folders[node.name], "empty_above": True})

    outcomes = connections.on_each([entry.node for entry in shares], remove)
    return next((outcome.error.message for outcome in outcomes if outcome.error is not None), "")


def _remove_folder(run: RunDir) -> str:
    """Remove a run's folder here; return the error, or an empty text."""
    try:
        shutil.rmtree(run.root)
    except OSError as problem:
        return f"{run.root}: {problem.strerror or problem}"
    return ""


def tree_size(run: RunDir) -> int:
    """Return how many bytes the run's files here have."""
    return _size_below(str(run.root))


def _size_below(folder: str) -> int:
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _size_below(entry.path)
            elif entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total
