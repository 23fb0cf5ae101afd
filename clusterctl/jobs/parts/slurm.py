"""The `slurm` part of a job: what `clusterctl submit slurm` asks Slurm for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clusterctl.wire.fields import Checked, Problem, setting

# Slurm's own forms: minutes, minutes:seconds, hours:minutes:seconds, and days-hours with any of them.
TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]{1,2}|[0-9]+:[0-9]{1,2}:[0-9]{1,2}|[0-9]+-[0-9]+(?::[0-9]{1,2}){0,2}")
# A word of an #SBATCH line: no space and no line break can begin another option.
WORD = re.compile(r"[^\s#'\"\\]+")
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
LINE = re.compile(r"[^\n]*")


def word() -> str:
    """Return the setting of one word of an #SBATCH line; empty texts leave the cluster's default."""
    found: str = setting("", pattern=WORD, noun="one word", example="leave out spaces and quotes")
    return found


def lines() -> tuple[str, ...]:
    """Return the setting of a list of lines."""
    found: tuple[str, ...] = setting((), pattern=LINE, noun="one line of text", example="a list of lines")
    return found


@dataclass(frozen=True)
class SlurmOptions(Checked):
    """What a job asks Slurm for; empty texts leave the cluster's default."""

    nodes: int = setting(1, least=1)
    """How many nodes."""
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
    time: str = setting(
        "",
        pattern=TIME,
        noun="a time of Slurm",
        example="as in 90 (minutes), 12:00:00 or 2-00",
        form={"type": ["string", "integer"]},
    )
    """Time limit: minutes, hours:minutes:seconds or days-hours."""
    requeue: bool = setting(True)
    """Save and wait for nodes again before the time limit or on preemption."""
    signal: int = setting(120, least=0)
    """Seconds before the time limit at which the run saves. Slurm may be up to a minute early."""
    extra: tuple[str, ...] = lines()
    """More options of sbatch: --mem=0, --exclusive."""
    setup: tuple[str, ...] = lines()
    """Shell lines of the batch file before the run starts: module load cann."""

    def problems(self) -> Iterator[Problem]:
        if fault := _gres_fault(self.gres):
            yield "gres", fault, "NAME:COUNT, as in npu:8 or gpu:a100:4"
        for option in self.extra:
            name = OPTION.match(option)
            if name is None:
                problem = f"{option[:80]!r} is not an option of sbatch"
                yield "extra", problem, "as in --mem=0 or --exclusive"
            elif name[0] in KEYS:
                yield "extra", f"{option[:80]!r} is a key of this part", f"slurm: {{{KEYS[name[0]]}: ...}}"
            elif name[0] in NEEDED:
                yield "extra", f"{option[:80]!r}: the run needs its own {name[0]}", "leave it out"


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


def minutes_of(time: str) -> float:
    """Return the minutes of a time as Slurm writes it."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return (int(days) * 24 + hours) * 60 + minutes + seconds / 60
    if len(parts) == 3:
        return parts[0] * 60 + parts[1] + parts[2] / 60
    return parts[0] + (parts[1] / 60 if len(parts) == 2 else 0)
