"""The `slurm` part of a job: what `clusterctl submit slurm` asks Slurm for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterctl.document import Section

# Slurm's own forms: minutes, minutes:seconds, hours:minutes:seconds, and days-hours with any of them.
TIME = re.compile(
    r"(?:[0-9]+|[0-9]+:[0-9]{1,2}|[0-9]+:[0-9]{1,2}:[0-9]{1,2}|[0-9]+-[0-9]+(?::[0-9]{1,2}){0,2})\Z"
)
# A word of an #SBATCH line: no space and no line break can begin another option.
WORD = re.compile(r"[^\s#'\"\\]+\Z")
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
WORDS = ("partition", "account", "qos", "gres", "constraint", "reservation", "exclude")


@dataclass(frozen=True)
class SlurmOptions:
    """What a job asks Slurm for; empty texts leave the cluster's default."""

    nodes: int = 1
    """How many nodes."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = ""
    """Devices of each node in Slurm's words, such as npu:8 or gpu:4."""
    constraint: str = ""
    reservation: str = ""
    exclude: str = ""
    """Nodes to leave out, as Slurm writes them."""
    cpus: int = 0
    """Processor cores of each node; 0 leaves the cluster's default."""
    time: str = ""
    """Time limit: minutes, hours:minutes:seconds, or days-hours."""
    requeue: bool = True
    """Whether a run that is preempted, or near its time limit, saves and waits for nodes again."""
    signal: int = 120
    """Seconds before the time limit at which the run saves. Slurm may be up to a minute early."""
    extra: tuple[str, ...] = ()
    """More options of sbatch, such as --mem=0 or --exclusive."""
    setup: tuple[str, ...] = ()
    """Shell lines of the batch file before the run starts, such as `module load cann`."""


def read_slurm(top: Section) -> SlurmOptions | None:
    """Return the `slurm` part of a job, or None if it has none."""
    inner = top.section("slurm")
    if top.value.get("slurm") is None:
        return None
    words = {key: _word(inner, key) for key in WORDS}
    found = SlurmOptions(
        nodes=_count(inner, "nodes", 1, 1),
        cpus=_count(inner, "cpus", 0, 1),
        time=_time(inner),
        requeue=inner.take("requeue", bool, True) is not False,
        signal=_count(inner, "signal", SlurmOptions.signal, 0),
        extra=_lines(inner, "extra"),
        setup=_lines(inner, "setup"),
        **words,
    )
    if fault := _gres_fault(found.gres):
        inner.fault("gres", fault, "NAME:COUNT, as in npu:8 or gpu:a100:4")
    for option in found.extra:
        name = OPTION.match(option)
        if name is None:
            inner.fault(
                "extra", f"{option[:80]!r} is not an option of sbatch", "as in --mem=0 or --exclusive"
            )
        elif name[0] in KEYS:
            inner.fault("extra", f"{option[:80]!r} is a key of this part", f"slurm: {{{KEYS[name[0]]}: ...}}")
        elif name[0] in NEEDED:
            inner.fault("extra", f"{option[:80]!r}: the run needs its own {name[0]}", "leave it out")
    inner.done()
    return found


def _word(section: Section, key: str) -> str:
    text = section.take_text(key)
    if text and not WORD.match(text):
        section.fault(key, f"{text[:80]!r} is not one word", "leave out spaces and quotes")
        return ""
    return text


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


def _count(section: Section, key: str, default: int, least: int) -> int:
    value = section.take(key, int, default)
    if value is None:
        return default
    if value < least and section.value.get(key) is not None:
        section.fault(key, f"{value} is too small", f"{least} or more")
        return default
    return value


def _time(section: Section) -> str:
    text = section.take_text("time")
    if text and not TIME.match(text):
        section.fault("time", f"{text[:80]!r} is not a time of Slurm", "as in 90 (minutes), 12:00:00 or 2-00")
        return ""
    return text


def _lines(section: Section, key: str) -> tuple[str, ...]:
    lines = section.take(key, list, []) or []
    for line in lines:
        if not isinstance(line, str) or "\n" in line:
            section.fault(key, f"{line!r:.80} is not one line of text", "a list of lines")
            return ()
    return tuple(lines)


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
