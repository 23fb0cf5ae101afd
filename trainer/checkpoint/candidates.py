"""Find the checkpoints from which a training can resume: the reports of the nodes, and rank 0's decision.

The values travel between ranks as JSON; a class with `of` reads its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clusterctl.wire.saved import OLD

# Limit of missing files in a report: with many nodes, each lacks most files.
MOST_NAMED = 16


@dataclass(frozen=True)
class FolderReport:
    """The files of a checkpoint that one node has, or why it cannot be read there."""

    name: str
    path: str
    fault: str = ""
    step: int = 0
    state: str = "all"
    digest: str = ""
    """The SHA-256 of the manifest."""
    have: Sequence[str] = ()
    """The files that this node has in the right size."""
    count: int = 0
    """Number of files of the checkpoint on all nodes."""
    lacks: Sequence[str] = ()
    """The missing files, if they are few."""
    unconfirmed: bool = False
    """Whether the node published it, and no save of this training was ever confirmed by all nodes."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint whose files are all on nodes of this run."""

    name: str
    """The name of its folder on nodes that do not have it yet."""
    names: dict[str, str]
    """The name of its folder on the other nodes, by the rank of the node's leader."""
    source: int
    """The rank of a leader that has the manifest."""
    lacking: Sequence[int]
    """Ranks of the leaders without the manifest."""
    everywhere: bool
    """Whether every node has every file."""

    def name_on(self, leader: int) -> str:
        return self.names.get(str(leader), self.name)


@dataclass(frozen=True)
class Candidates:
    """The complete checkpoints, newest first, and the faults of the others."""

    complete: Sequence[Candidate]
    faults: Sequence[str]
    skipped: Sequence[str]
    """Why checkpoints are skipped: they contain only weights, or are a first save that did not finish."""

    @classmethod
    def of(cls, value: Any) -> Candidates:
        complete = [Candidate(**candidate) for candidate in value["complete"]]
        return cls(complete, value["faults"], value["skipped"])


@dataclass(frozen=True)
class RankNeeds:
    """The files that a rank reads, those that its node has if it is the leader, and why it cannot load."""

    needs: Sequence[str]
    have: Sequence[str]
    fault: str


@dataclass(frozen=True)
class FileMoves:
    """Files with the leaders that send and receive them; or why a rank cannot load."""

    moves: Sequence[tuple[str, int, int]]
    fault: str

    @classmethod
    def of(cls, value: Any) -> FileMoves:
        return cls([tuple(move) for move in value["moves"]], value["fault"])


def order(values: Sequence[Any], leaders: Sequence[int], named: bool) -> Any:
    """Return the Candidates of all ranks' lists of FolderReports, both as JSON values.

    `named`: the user chose the checkpoint, so one with only weights is not skipped.
    """
    reports = [(rank, FolderReport(**entry)) for rank, own in enumerate(values) for entry in own]
    faults = [report.fault for _, report in reports if report.fault]
    readable = [(rank, report) for rank, report in reports if not report.fault]
    readable.sort(key=lambda item: (-item[1].step, OLD in item[1].name, item[1].digest))
    # A step that was being saved again when a run was killed may have its older name on some nodes.
    groups: dict[tuple[int, str], list[tuple[int, FolderReport]]] = {}
    for rank, report in readable:
        groups.setdefault((report.step, report.digest), []).append((rank, report))
    complete, skipped = [], []
    for (step, _), members in groups.items():
        first = members[0][1]
        missing = first.count - len({name for _, report in members for name in report.have})
        if missing > 0:
            if not named and all(report.unconfirmed for _, report in members):
                skipped.append(f"{first.path}: the first save did not finish, and nothing was saved before")
                continue
            nowhere = set(first.lacks).intersection(*(report.lacks for _, report in members))
            by_name = f": {', '.join(sorted(nowhere))}" if nowhere else ""
            faults.append(
                f"{first.path}: {missing} of its {first.count} files are on no node of this run{by_name}"
            )
        elif first.state == "weights" and not named:
            skipped.append(f"{first.path}: holds weights alone, and training needs the optimizer's moments")
        else:
            alone = sum(number == step for number, _ in groups) == 1
            complete.append(_candidate(members, leaders, alone))
    return asdict(Candidates(complete, faults, skipped))


def _candidate(members: Sequence[tuple[int, FolderReport]], leaders: Sequence[int], alone: bool) -> Candidate:
    """Return the checkpoint that these nodes have; `alone`: it is the only checkpoint of its step."""
    source, first = members[0]
    name = first.name.partition(OLD)[0]
    names = {str(rank): report.name for rank, report in members}
    lacking = [leader for leader in leaders if str(leader) not in names]
    full = all(len(report.have) == first.count for _, report in members)
    return Candidate(name if alone else f"{name}{OLD}9", names, source, lacking, full and not lacking)


def moves(values: Sequence[Any], leaders: Sequence[int]) -> Any:
    """Return the FileMoves for all ranks' RankNeeds, both as JSON values."""
    ranks = [RankNeeds(**value) for value in values]
    fault = next((rank.fault for rank in ranks if rank.fault), "")
    have = {leader: set(ranks[leader].have) for leader in set(leaders)}
    lacking = {
        (name, leader)
        for rank, leader in zip(ranks, leaders, strict=True)
        for name in rank.needs
        if name not in have[leader]
    }
    made = []
    for name, target in sorted(lacking):
        sources = [leader for leader in sorted(have) if name in have[leader]]
        if not sources:
            fault = fault or f"{name} is on no node of this run"
        else:
            made.append((name, sources[0], target))
    return asdict(FileMoves(made, fault))
