"""The `slurm` part of a job: what `clusterctl submit slurm` asks Slurm for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clusterctl.jobs.parts.queue import QueueOptions, extra_problems, lines, word
from clusterctl.wire.fields import Problem, setting

# One kind of devices: NAME, NAME:COUNT or NAME:TYPE:COUNT, and others after a comma.
GRES = re.compile(
    r"[\w-]+(?::[\w.-]+)?(?::[0-9]+[KMG]?)?(?:,[\w-]+(?::[\w.-]+)?(?::[0-9]+[KMG]?)?)*\Z", re.ASCII
)
DEVICES = ("gpu", "npu")
# Options of sbatch that are keys of this part, or of the job, and those that the run itself needs.
KEYS = {
    **dict.fromkeys(("--nodes", "-N"), "nodes"),
    **dict.fromkeys(("--partition", "-p"), "partition"),
    **dict.fromkeys(("--account", "-A"), "account"),
    **dict.fromkeys(("--qos", "-q"), "qos"),
    **dict.fromkeys(("--constraint", "-C"), "constraint"),
    **dict.fromkeys(("--exclude", "-x"), "exclude"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "cpus"),
    **dict.fromkeys(("--time", "-t"), "time"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "requeue"),
    "--gres": "gres",
    "--reservation": "reservation",
    "--signal": "signal",
}
NEEDED = {
    "--job-name",
    "-J",
    "--output",
    "-o",
    "--open-mode",
    "--ntasks-per-node",
    "--ntasks",
    "-n",
    "--array",
    "-a",
}
NEEDED |= {"--wrap", "--test-only", "--parsable"}
OPTION = re.compile(r"--[a-z-]+|-[A-Za-z]")


@dataclass(frozen=True)
class SlurmOptions(QueueOptions):
    """What a job asks Slurm for; empty texts leave the cluster's default."""

    partition: str = word()
    """Partition. Default: the cluster's."""
    account: str = word()
    """Account that is charged."""
    qos: str = word()
    """Quality of service."""
    gres: str = word()
    """Devices of each node in Slurm's words: npu:8, gpu:4."""
    constraint: str = word()
    """Features that the nodes must have."""
    reservation: str = word()
    """Reservation to use."""
    exclude: str = word()
    """Nodes to leave out: node[3-4]."""
    cpus: int | None = setting(None, least=1)
    """Processor cores of each node. Default: the cluster's."""
    extra: tuple[str, ...] = lines()
    """More options of sbatch: --mem=0, --exclusive."""

    def problems(self) -> Iterator[Problem]:
        if fault := _gres_fault(self.gres):
            yield "gres", fault, "NAME:COUNT, as in npu:8 or gpu:a100:4"
        yield from extra_problems(
            "slurm", "sbatch", self.extra, OPTION, KEYS, NEEDED, "--mem=0 or --exclusive"
        )


def _gres_fault(gres: str) -> str:
    """Return what is wrong with the devices that a job asks for; "" if nothing is."""
    if not gres:
        return ""
    if not GRES.match(gres):
        return f"{gres[:80]!r} names no devices of Slurm"
    name, *rest = gres.partition(",")[0].split(":")
    if rest and rest[-1].isdecimal() and not int(rest[-1]):
        return f"{gres[:80]!r} asks for no device"
    # The plan needs the number of ranks.
    counted = not rest or rest[-1].isdecimal()
    return f"{gres[:80]!r} gives no number of devices" if name in DEVICES and not counted else ""
