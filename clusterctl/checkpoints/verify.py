"""Verify a checkpoint where its files are: every machine hashes its own files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointCopy
from clusterctl.checkpoints.holder import FileCheck, Report, Verification
from clusterctl.errors import ClusterctlError
from clusterctl.transport.fanout import on_each


@dataclass(frozen=True)
class Damage:
    """A damaged file, or a file that no machine has."""

    on: str
    file: str
    fault: str
    tensor: str = ""

    def __str__(self) -> str:
        return f"{self.on}: {self.fault}" + (f" (tensor {self.tensor})" if self.tensor else "")


@dataclass(frozen=True)
class Verified:
    """The result for one checkpoint."""

    checkpoint: Checkpoint
    damages: tuple[Damage, ...]
    checked: int
    """Files that were compared, with every copy counted."""

    @property
    def ok(self) -> bool:
        return not self.damages

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "step": self.checkpoint.step,
            "name": self.checkpoint.name,
            "health": self.checkpoint.health.value,
            "bytes": self.checkpoint.facts.bytes,
            "files": self.checkpoint.facts.count,
            "checked": self.checked,
            "on": list(self.checkpoint.nodes),
            "damaged": [asdict(damage) for damage in self.damages],
        }


def verify(checkpoint: Checkpoint, report_of: Callable[[str], Report]) -> Verified:
    """Return the damages; `report_of` returns for a machine the function that counts its bytes."""
    holdings = {holding.holder.name: holding for holding in checkpoint.holdings}
    results = on_each(
        [holding.holder.node for holding in holdings.values()],
        lambda node: _verified(holdings[node.name], report_of(node.name)),
    )
    damages: list[Damage] = []
    checked = 0
    for outcome in results:
        result = outcome.get()
        damages += [
            Damage(outcome.node.name, check.file, check.fault, check.tensor) for check in result.faults
        ]
        checked += len(result.files)
        for name, check in result.files.items():
            if check.fault:
                damages.append(Damage(outcome.node.name, name, check.fault, check.tensor))
    if checkpoint.missing > 0:
        damages += _missing(checkpoint, damages)
    return Verified(checkpoint, tuple(damages), checked)


def _missing(checkpoint: Checkpoint, known: Sequence[Damage]) -> list[Damage]:
    """Return the files that no machine has, without those that are known to be damaged."""
    wanted = checkpoint.manifest().files
    absent = sorted(wanted.keys() - checkpoint.copies_of.keys() - {damage.file for damage in known})
    return [
        Damage("all machines", name, f"{checkpoint.name}/{name}: missing, on every machine")
        for name in absent
    ]


def _verified(holding: CheckpointCopy, report: Report) -> Verification:
    """Return the verification of one machine's files; a machine that fails is a fault of its part."""
    try:
        return holding.holder.verify(holding.entry.path, report)
    except ClusterctlError as error:
        fault = FileCheck(f"{holding.entry.path}: not verified: {error.message}")
        return Verification(holding.entry.path, {}, (fault,))
