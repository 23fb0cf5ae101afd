"""A checkpoint and its files on all machines, combined from the list of each machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property

from clusterctl.checkpoints.holder import Entry, Holder, Listing
from clusterctl.errors import UsageError
from clusterctl.inventory import nodeset
from clusterctl.wire.saved import Manifest


class Health(str, Enum):
    """Whether a checkpoint can be loaded, judged by names, sizes and manifests."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class CheckpointCopy:
    """One machine and the files of a checkpoint on it."""

    holder: Holder
    entry: Entry


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint and its files on all machines."""

    step: int
    digest: str
    holdings: tuple[CheckpointCopy, ...]

    @cached_property
    def readable(self) -> CheckpointCopy | None:
        """Return a copy whose manifest could be read."""
        return next((holding for holding in self.holdings if holding.entry.digest), None)

    @cached_property
    def facts(self) -> Entry:
        """Return the facts from a readable manifest, else from the folder's name."""
        return (self.readable or self.holdings[0]).entry

    def read_copy(self) -> CheckpointCopy:
        """Return a copy whose manifest could be read; raise a UsageError without one."""
        if self.readable is None:
            raise UsageError("\n".join(self.faults) or f"{self.name} has no manifest", "choose another step")
        return self.readable

    def manifest(self) -> Manifest:
        """Return the manifest from a machine where it can be read; raise a UsageError without one."""
        copy = self.read_copy()
        return copy.holder.manifest(copy.entry.path)

    def manifest_content(self) -> bytes:
        """Return the content of the manifest, byte for byte."""
        copy = self.read_copy()
        return copy.holder.manifest_content(copy.entry.path)

    @property
    def name(self) -> str:
        return self.facts.name

    @cached_property
    def copies_of(self) -> Counter[str]:
        """Return how many machines have each file."""
        return Counter(name for holding in self.holdings for name in holding.entry.have)

    @property
    def missing(self) -> int:
        """Return how many files no machine has."""
        return self.facts.count - len(self.copies_of)

    @property
    def copies(self) -> int:
        """Return the number of machines that have each file, for the file with the fewest."""
        return 0 if self.missing or not self.copies_of else min(self.copies_of.values())

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(f"{h.holder.name}: {fault}" for h in self.holdings for fault in h.entry.faults)

    @property
    def health(self) -> Health:
        """Return the health; a fault counts only if no machine has a valid copy of the file."""
        if not self.digest:
            return Health.DAMAGED
        if not self.missing:
            return Health.COMPLETE
        return Health.DAMAGED if self.faults else Health.INCOMPLETE

    @property
    def is_resumable(self) -> bool:
        return self.health is Health.COMPLETE and self.facts.state != "weights"

    @property
    def in_use(self) -> bool:
        return any(holding.entry.in_use for holding in self.holdings)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(holding.holder.name for holding in self.holdings)

    def holders_of(self, file: str) -> list[CheckpointCopy]:
        """Return the machines that have a file."""
        return [holding for holding in self.holdings if file in holding.entry.have]

    def as_json(self) -> dict[str, object]:
        facts = asdict(self.facts)
        for key in ("have", "faults", "in_use", "path", "count"):
            del facts[key]
        return {
            **facts,
            "layout": self.facts.layout and self.facts.layout.as_json(),
            "health": self.health.value,
            "copies": self.copies,
            "files": self.facts.count,
            "missing": self.missing,
            "faults": list(self.faults),
            "in_use": self.in_use,
            "on": {holding.holder.name: holding.entry.path for holding in self.holdings},
        }


@dataclass(frozen=True)
class CheckpointList:
    """All checkpoints of a run or folder, newest first."""

    source: str
    checkpoints: tuple[Checkpoint, ...]
    latest: str = ""
    """The folder's name of the newest checkpoint that all nodes confirmed."""
    unreachable: dict[str, str] = field(default_factory=dict, hash=False)

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; raise a UsageError if there is none."""
        for checkpoint in self.checkpoints:
            if checkpoint.step == step:
                return checkpoint
        steps = ", ".join(str(checkpoint.step) for checkpoint in self.checkpoints) or "none"
        raise UsageError(f"{self.source}: no checkpoint of step {step}", f"its steps: {steps}")

    def newest(self) -> Checkpoint:
        """Return the newest complete checkpoint, else the newest; raise a UsageError without any."""
        complete = [checkpoint for checkpoint in self.checkpoints if checkpoint.health is Health.COMPLETE]
        if not self.checkpoints:
            away, hint = "", "a training writes them as `train.save` of its job says"
            if self.unreachable:
                away = f" was found: {nodeset.fold(list(self.unreachable))} not reached"
                hint = "it may be there: find out why they do not answer with `clusterctl doctor`"
            raise UsageError(f"{self.source}: no checkpoint{away}", hint)
        return (complete or list(self.checkpoints))[0]

    def chosen(self, step: int | None) -> Checkpoint:
        return self.newest() if step is None else self.at(step)


def merge(first: Sequence[Checkpoint], second: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of two lists; those with the same manifest become one."""
    holdings = [holding for checkpoint in (*first, *second) for holding in checkpoint.holdings]
    return grouped(holdings)


def latest_of(listings: Sequence[tuple[Holder, Listing]]) -> str:
    """Return the newest name in the `latest` files: some nodes may not have written theirs yet."""
    return max((listing.latest for _, listing in listings), default="")


def combine(listings: Sequence[tuple[Holder, Listing]]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of several machines, newest first."""
    return grouped(
        [CheckpointCopy(holder, entry) for holder, listing in listings for entry in listing.checkpoints]
    )


def grouped(holdings: Iterable[CheckpointCopy]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that these holdings are of, newest first.

    Those with the same manifest are one. A machine whose manifest is damaged belongs to the checkpoint of that name.
    """
    groups: dict[tuple[int, str], list[CheckpointCopy]] = {}
    damaged: list[CheckpointCopy] = []
    for holding in holdings:
        if holding.entry.digest:
            groups.setdefault((holding.entry.step, holding.entry.digest), []).append(holding)
        else:
            damaged.append(holding)
    for holding in damaged:
        same = [key for key, members in groups.items() if members[0].entry.name == holding.entry.name]
        groups.setdefault(same[0] if same else (holding.entry.step, ""), []).append(holding)
    found = [Checkpoint(step, digest, tuple(members)) for (step, digest), members in groups.items()]
    return tuple(sorted(found, key=lambda item: (-item.step, ".old" in item.name, item.name)))
