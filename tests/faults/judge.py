"""Decide from observations whether a run handled a fault correctly; summarize many runs in one table."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from native.compiled import library
from tests.faults.draw import (
    AWAY,
    KINDS,
    LOST,
    STOP,
    Fault,
    expected_end,
)
from tests.faults.fake_trainer import state_at

# Within this many seconds a node that is reachable again must stop its abandoned ranks.
COMES_BACK = 30.0
UNBORN = (
    # Python's last output if it is interrupted while it starts.
    "Failed to import the site module"
)
# How many checkpoints may be lost with a node: the one that was being copied.
SAVES_BEHIND = 1


@dataclass(frozen=True)
class Story:
    """The observations of one run with one fault."""

    fault: Fault
    phase: str = ""
    """The run's last phase; "" if no phase was recorded."""
    attempt: int = 1
    steps: int = 0
    reasons: tuple[str, ...] = ()
    """The reason of each restart."""
    output: str = ""
    """What the user's commands wrote to stderr."""
    codes: Mapping[str, int] = field(default_factory=dict)
    """The exit code of each command, by name."""
    metrics: Sequence[Mapping[str, Any]] = ()
    struck: float = 0.0
    healed: float = 0.0
    noticed: float | None = None
    """Seconds from the fault until the rank's node noticed it."""
    known: float | None = None
    """Seconds from the fault until it was recorded in the run's history."""
    stopped: float | None = None
    """Seconds from that record until the last rank of the attempt had ended."""
    scans: Sequence[tuple[float, frozenset[tuple[int, str]]]] = ()
    """The living (attempt, node) pairs at the time of each change."""
    lost_lines: tuple[str, ...] = ()
    """Copied logs that differ from the nodes' logs, and lines that were shown twice or never."""
    left: tuple[str, ...] = ()
    """Processes, ports and files that were left behind."""
    seconds: float = 0.0
    damaged: int = 0
    """The step of the checkpoint whose manifest was damaged."""
    missed: str = ""
    """Why the fault never struck; "" if it did."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one story."""

    well: bool
    cause: bool | None
    """Whether the reported reason was right; None if no reason was expected."""
    broken: tuple[str, ...]
    """Broken invariants, and what prevented a good end."""


def judge(story: Story) -> Verdict:
    """Return the judgement of the end, the cause, and the invariants of all runs."""
    broken = [
        *([story.missed] if story.missed else ()),
        *_end(story),
        *one_attempt(story.scans, story.fault, story.struck, story.healed),
        *(steps_grow(story) if story.metrics else ()),
        *story.lost_lines,
        *compiled(story),
    ]
    cause = _cause(story)
    return Verdict(not broken, cause, tuple(broken))


def _end(story: Story) -> Iterator[str]:
    want = expected_end(story.fault)
    if story.fault.kind == "Ctrl-C" and UNBORN in story.output and not story.phase:
        # Python had not started yet.
        return
    if story.phase not in want.phases:
        yield f"the run is {story.phase or 'not recorded'}, not {' or '.join(want.phases) or 'refused'}"
    least, most = want.attempts
    if story.phase and not least <= story.attempt <= most:
        yield f"{story.attempt} attempts, not {least} to {most}"
    for name, code in story.codes.items():
        if code in (1, 70, 124) or (code < 0 and code not in (-2, -9)):
            yield f"`{name}` ended with {code}"
    if "Traceback (most recent call last)" in _ours(story.output):
        yield "a traceback on the user's screen"
    # The latter means that Python was interrupted before the first line of our code.
    if story.fault.kind == "Ctrl-C" and story.codes.get("launch") not in (
        130,
        -2,
    ):
        yield f"Ctrl-C ended the launch with {story.codes.get('launch')}"


def _ours(output: str) -> str:
    """Return the output of clusterctl itself, without quoted lines of ranks, which follow a bar or a prefix."""
    return "\n".join(line for line in output.splitlines() if not re.match(r"\s|node\d+:\d+|[│|]", line))


def _cause(story: Story) -> bool | None:
    pattern = expected_end(story.fault).cause
    if not pattern or (story.phase == "finished" and story.attempt == 1):
        return None
    if story.phase == "finished":
        return any(re.search(pattern, reason) for reason in story.reasons)
    return bool(re.search(pattern, story.output))


def one_attempt(
    scans: Sequence[tuple[float, frozenset[tuple[int, str]]]], fault: Fault, struck: float, healed: float
) -> Iterator[str]:
    """Yield violations of "at most one attempt lives at a time"; unreachable nodes are exempt."""
    for at, living in scans:
        away = fault.kind in AWAY and struck <= at <= (healed or at) + COMES_BACK
        attempts = {attempt for attempt, node in living if not (away and node == fault.node)}
        if len(attempts) > 1:
            yield f"attempts {', '.join(map(str, sorted(attempts)))} lived at the same time"
            return


def compiled(story: Story) -> Iterator[str]:
    """Yield the rank that compiled the trainer's library during the run: its times are those of the compiler."""
    for record in story.metrics:
        for note in record.get("notes") or ():
            if "C++ library" in note:
                yield f"a rank was not ready to train: {note}; {library.BUILD_HINT}"


def steps_grow(story: Story) -> Iterator[str]:
    """Yield violations of: steps increase within an attempt, and an attempt starts at a valid checkpoint."""
    saved, step, ended = 0, 0, False
    for record in story.metrics:
        kind, at = record.get("event"), int(record.get("step") or 0)
        if kind == "start":
            yield from _begins(story, record, saved)
        elif kind == "step" and at != step + 1:
            yield f"step {at} followed step {step}"
        if kind in ("start", "step"):
            step = at
        if "state" in record and record["state"] != state_at(at):
            yield f"{kind} at step {at} has a state that does not follow from a correct checkpoint"
        saved = max(saved, at) if kind == "checkpoint" else saved
        ended = kind == "end"
    if story.phase == "finished" and not (ended and step == story.steps):
        yield f"finished at step {step} of {story.steps}"


def _begins(story: Story, start: Mapping[str, Any], saved: int) -> Iterator[str]:
    at, fault = int(start.get("step") or 0), story.fault
    every = int(((start.get("config") or {}).get("save") or {}).get("every") or story.steps)
    # The newest checkpoint was lost with its node.
    may_lag = fault.real and (fault.kind in AWAY or story.damaged > 0)
    if at < saved - (SAVES_BEHIND * every if may_lag else 0):
        yield f"resumed at step {at}, although step {saved} was saved"
    if story.damaged and at == story.damaged and int(start.get("attempt") or 2) == 2:
        yield f"began at step {at}, whose manifest was damaged"
    if at and not start.get("resumed_from"):
        yield f"began at step {at} without a checkpoint"


# -- many of them -------------------------------------------------------------------------------------------

RANKS = (
    "rank killed",
    "rank crashed",
    "children left behind",
    "daemon left behind",
    "clock skewed",
    "crash at the same step",
)


@dataclass(frozen=True)
class Row:
    """What is kept of a story for the figures of many."""

    number: int
    kind: str
    fault: str
    well: bool
    cause: bool | None
    left: int
    lost_lines: int
    restarted: bool
    known: float | None
    noticed: float | None
    stopped: float | None

    @classmethod
    def of(cls, story: Story) -> Row:
        verdict, fault = judge(story), story.fault
        counts = (len(story.left), len(story.lost_lines), story.attempt > 1 and fault.phase != STOP)
        times = (story.known, story.noticed, story.stopped)
        return cls(fault.number, fault.kind, str(fault), verdict.well, verdict.cause, *counts, *times)


def rows_of(results: Path) -> list[Row]:
    """Return the rows of earlier parts of a campaign."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def table(rows: Sequence[Row]) -> list[str]:
    """Return one line per kind of fault, then the totals and the measured values with their targets."""
    lines = [("fault", "count", "known in (median, worst)", "cause right", "ended well", "left behind")]
    for kind in (*KINDS, "all"):
        some = [row for row in rows if kind in (row.kind, "all")]
        causes = [row.cause for row in some if row.cause is not None]
        known = [row.known for row in some if row.known is not None and kind != "all"]
        if some:
            lines.append(
                (
                    kind,
                    str(len(some)),
                    f"{statistics.median(known):.2f} s, {max(known):.2f} s" if known else "",
                    f"{sum(causes)} of {len(causes)}" if causes else "",
                    str(sum(row.well for row in some)),
                    str(sum(bool(row.left) for row in some)),
                )
            )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(map(str.ljust, line, widths)) for line in lines]
    dead, gone = [row for row in rows if row.kind in RANKS], [row for row in rows if row.kind in LOST]
    return [
        *shown,
        f"a rank's death noticed on its node: {_worst([row.noticed for row in dead], 1.0)}; "
        f"here: {_worst([row.known for row in dead], 1.0)}",
        f"the others stopped after that: {_worst([row.stopped for row in dead], 10.0)}",
        f"a node lost or frozen known: {_worst([row.known for row in gone if row.restarted], 15.0)}",
        f"logs with lost or repeated lines: {sum(row.lost_lines for row in rows)}",
    ]


def _worst(times: Sequence[float | None], limit: float) -> str:
    values = [value for value in times if value is not None]
    if not values:
        return "none"
    return f"median {statistics.median(values):.2f} s, worst {max(values):.2f} s of {len(values)} (at most {limit:g} s)"
