"""Find the worker that failed below a launcher, from its output: torchrun's report, or DeepSpeed's last line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# torchrun's report of the worker that failed first; accelerate starts torchrun.
ROOT_CAUSE = "Root Cause (first observed failure):"
PLACE = re.compile(r"\s*rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
EXIT = re.compile(r"\s*exitcode\s*: (?P<code>-?\d+)")
RECORDED = re.compile(r"\s*traceback\s*: (?P<text>.*)")
# DeepSpeed's launcher names the command of the worker.
DEEPSPEED = re.compile(
    r"launch\.py:.*--local_rank=(?P<local>\d+)\b.* exits with return code = (?P<code>-?\d+)"
)
# What torchrun, and torch in a worker, write before each line of a worker; both may stand there.
PREFIX = re.compile(r"(?:\[(?:rank|default)\d+\]:? ?)+")
# Begins the report of torchrun itself, after the workers' own lines.
LAUNCHERS_OWN = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ |\[\d{4}-\d\d-\d\d .*\[launch\.py")


@dataclass(frozen=True)
class Worker:
    """A worker that failed."""

    local_rank: int
    rank: int
    """Its global rank."""
    exit_code: int | None
    signal: int | None
    lines: tuple[str, ...]
    """Its own output, as far as the launcher's shows it."""


def failed_worker(tail: Sequence[str], first_rank: Callable[[], int]) -> Worker | None:
    """Return the worker that failed first by the end of a launcher's output; None if it names none.

    `first_rank` returns the global rank of the first worker of that node.
    """
    at = next((index for index in reversed(range(len(tail))) if tail[index].strip() == ROOT_CAUSE), None)
    if at is not None:
        return _of_torchrun(tail[:at], tail[at + 1 :])
    for index in reversed(range(len(tail))):
        if found := DEEPSPEED.search(tail[index]):
            local = int(found["local"])
            return _worker(first_rank() + local, local, int(found["code"]), tail[:index])
    return None


def _of_torchrun(before: Sequence[str], report: Sequence[str]) -> Worker | None:
    place = next(filter(None, map(PLACE.match, report)), None)
    ended = next(filter(None, map(EXIT.match, report)), None)
    if place is None or ended is None:
        return None
    worker = _worker(int(place["rank"]), int(place["local"]), int(ended["code"]), before)
    recorded = _recorded(report)
    return (
        Worker(worker.local_rank, worker.rank, worker.exit_code, worker.signal, recorded)
        if recorded
        else worker
    )


def _recorded(report: Sequence[str]) -> tuple[str, ...]:
    """Return the traceback of a program that records its exception for torchrun; empty for other programs."""
    at = next((index for index, line in enumerate(report) if RECORDED.match(line)), None)
    if at is None:
        return ()
    found = RECORDED.match(report[at])
    assert found is not None
    if not found["text"].startswith("Traceback"):
        return ()
    rest = []
    for line in report[at + 1 :]:
        if line.startswith("====="):
            break
        # The report indents the lines that follow.
        rest.append(line[2:] if line.startswith("  ") else line)
    return (found["text"], *rest)


def _worker(rank: int, local: int, code: int, before: Sequence[str]) -> Worker:
    number = -code if code < 0 else None
    return Worker(local, rank, None if code < 0 else code, number, _lines_of(rank, local, before))


def _lines_of(rank: int, local: int, before: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of one worker, without their prefixes; those of all workers if they have none."""
    own = own_lines(rank, local, before)
    if own:
        return tuple(own)
    plain = [line for line in before if not PREFIX.match(line)]
    ends = next((index for index, line in enumerate(plain) if LAUNCHERS_OWN.match(line)), len(plain))
    return tuple(plain[:ends])


def own_lines(rank: int, local: int | None, lines: Sequence[str]) -> list[str]:
    """Return the lines of a launcher's output whose prefix names a worker, without it."""
    names = {f"[rank{rank}]", f"[default{local}]"}
    return [
        line[found.end() :]
        for line in lines
        if (found := PREFIX.match(line)) and names & {f"{part}]" for part in re.split(r"\]:? ?", found[0])}
    ]


def prefixed(lines: Sequence[str]) -> list[int]:
    """Return the global ranks of the workers whose lines an output marks, in the order of their first lines."""
    names = (re.match(r"\[rank(\d+)\]", line) for line in lines)
    return list(dict.fromkeys(int(found[1]) for found in names if found))
