"""What every batch system is asked for: nodes, time, and when to save before the time ends."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from clusterctl.wire.fields import Checked, Problem, setting

# Minutes, minutes:seconds, hours:minutes:seconds, and days-hours with any of them.
TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]{1,2}|[0-9]+:[0-9]{1,2}:[0-9]{1,2}|[0-9]+-[0-9]+(?::[0-9]{1,2}){0,2}")
# A word of a line of a batch file: no space and no line break can begin another option.
WORD = re.compile(r"[^\s#'\"\\]+")
LINE = re.compile(r"[^\n]*")


def word() -> str:
    """Return the setting of one word of a batch file's option; empty texts leave the cluster's default."""
    found: str = setting("", pattern=WORD, noun="one word", example="leave out spaces and quotes")
    return found


def lines() -> tuple[str, ...]:
    """Return the setting of a list of lines."""
    found: tuple[str, ...] = setting((), pattern=LINE, noun="one line of text", example="a list of lines")
    return found


@dataclass(frozen=True)
class QueueOptions(Checked):
    """What a job asks a batch system for; empty texts leave the cluster's default."""

    nodes: int = setting(1, least=1)
    """How many nodes."""
    time: str = setting(
        "",
        pattern=TIME,
        noun="a time",
        example="as in 90 (minutes), 12:00:00 or 2-00",
        form={"type": ["string", "integer"]},
    )
    """Time limit: minutes, hours:minutes:seconds or days-hours."""
    requeue: bool = setting(True)
    """Save and wait for nodes again before the time limit or on preemption."""
    signal: int = setting(120, least=0)
    """Seconds before the time limit at which the run saves. The batch system may be up to a minute early."""
    extra: tuple[str, ...] = lines()
    """More options of the batch file, one per line."""
    setup: tuple[str, ...] = lines()
    """Shell lines of the batch file before the run starts: module load cann."""


def extra_problems(
    part: str,
    program: str,
    extra: tuple[str, ...],
    option: re.Pattern[str],
    keys: Mapping[str, str],
    needed: Collection[str],
    example: str,
) -> Iterator[Problem]:
    """Yield what is wrong in `extra`: what is no option, what is a key of the part, and what the run sets itself."""
    for text in extra:
        name = option.match(text)
        if name is None:
            yield "extra", f"{text[:80]!r} is not an option of {program}", f"as in {example}"
        elif name[0] in keys:
            yield "extra", f"{text[:80]!r} is a key of this part", f"{part}: {{{keys[name[0]]}: ...}}"
        elif name[0] in needed:
            yield "extra", f"{text[:80]!r}: the run needs its own {name[0]}", "leave it out"


def minutes_of(time: str) -> float:
    """Return the minutes of a time."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return (int(days) * 24 + hours) * 60 + minutes + seconds / 60
    if len(parts) == 3:
        return parts[0] * 60 + parts[1] + parts[2] / 60
    return parts[0] + (parts[1] / 60 if len(parts) == 2 else 0)
