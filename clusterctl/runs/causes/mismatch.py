"""Find the rank whose collective did not match those of the others, from the stacks with which all ranks ended.

The rank that receives what it does not expect fails first, and is not the one to blame.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from clusterctl.agent.ranks.frames import frames_in
from clusterctl.runs.causes.blame import Observation, Verdict, judge
from clusterctl.runs.causes.places import PREFIX, TRACEBACK, Frame

if TYPE_CHECKING:
    from clusterctl.runs.state import RankState

ABORTED = "Fatal Python error: Aborted"
RAISED_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.+)$')


def stack_in(lines: Sequence[str]) -> tuple[Frame, ...]:
    """Return the stack with which a program ended: where it was aborted, or else that of its last exception."""
    plain = [PREFIX.sub("", line) for line in lines]
    text = "\n".join(plain)
    found = frames_in(text.rpartition(ABORTED)[2]) if ABORTED in text else []
    if found:
        return tuple(Frame(frame.function, frame.file, frame.line) for frame in found)
    frames: list[Frame] = []
    for line, after in zip(plain, [*plain, ""][1:], strict=False):
        if line == TRACEBACK:
            frames = []
        elif match := RAISED_FRAME.match(line):
            source = "" if RAISED_FRAME.match(after) else after.strip()
            frames = [Frame(match["function"], match["file"], int(match["line"]), source), *frames]
    return tuple(frames)


def judge_ends(ranks: Iterable[RankState], lines_of: Callable[[RankState], Sequence[str]]) -> Verdict:
    """Return the rank that called another collective than the others, by where the ranks stood at their ends."""
    seen = (
        Observation(
            rank.rank,
            rank.rank,
            node=rank.node,
            device=rank.device,
            pid=rank.pid or 0,
            frames=stack_in(lines_of(rank)),
        )
        for rank in ranks
    )
    return judge(each for each in seen if each.frames)
