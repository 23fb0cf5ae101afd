"""Show the overview of a run: head lines, a table of nodes, unusual ranks, events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from clusterctl.cli import views
from clusterctl.runs.cause import how_it_ended
from clusterctl.runs.overview import UNSEEN, state_of_rank
from clusterctl.runs.state import RankPhase
from clusterctl.text import count, duration, escape_controls, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clusterctl.runs.cause import Cause
    from clusterctl.runs.overview import NodeView, Overview
    from clusterctl.runs.state import RankState

# Up to this many ranks all are shown; of more, only failed and slow ones.
ALL_RANKS = 16
STYLE = {**views.PHASE_STYLE, "restarting": "yellow", "unknown": "yellow"}


def whole(one: Overview, all_ranks: bool = False) -> Group:
    """Everything."""
    parts: list[RenderableType] = [head(one), views.table(*_nodes(one), right=["STEP", "AGE"])]
    few = all_ranks or len(one.ranks) <= ALL_RANKS
    ranks = [rank for rank in one.ranks if few or _is_odd(rank) or rank.rank in one.slow]
    if ranks:
        rows = [_rank(rank, one.slow.get(rank.rank)) for rank in sorted(ranks, key=lambda rank: rank.rank)]
        parts.append(
            views.table(["RANK", "NODE", "DEVICE", "PID", "STEP", "STATE"], rows, right=["RANK", "STEP"])
        )
    if one.damaged_events:
        lines = plural(one.damaged_events, "line")
        parts.append(Text(f"{lines} of events.jsonl could not be read", style="yellow"))
    if one.events:
        parts.append(Text("\n".join(_event(event) for event in one.events), style="dim"))
    spaced = [piece for part in parts for piece in (part, Text(""))]
    return Group(*spaced[:-1])


def head(one: Overview) -> Text:
    """Phase, attempt, step, loss, speed, ages."""
    text = Text.assemble((one.run, "bold"), "  ", (one.phase, STYLE.get(one.phase, "")))
    text.append("".join(f"  {part}" for part in _facts(one)))
    if one.controller is None and one.phase in ("running", "restarting", "unknown"):
        text.append("\nnobody looks after it: ", style="yellow")
        text.append(f"clusterctl attach {one.run} does, and brings its logs home")
    if one.cause:
        text.append(f"\nroot cause: {escape_controls(one.cause.title)}", style="red")
        text.append("".join(f"\n  {escape_controls(line)}" for line in _about(one.cause)))
    if one.verdict:
        text.append(f"\n{escape_controls(one.verdict)}", style="yellow")
    return text


def _about(cause: Cause) -> Iterator[str]:
    """What followed from a root cause, what to try, and where its log is."""
    for word, text in (("", cause.others), ("try: ", cause.hint), ("log: ", cause.log)):
        if text:
            yield f"{word}{text}"


def line(one: Overview) -> str:
    """Return the overview as one line, for use without a terminal."""
    return "  ".join([time.strftime("%H:%M:%S"), one.run, one.phase, *_facts(one)])


def changes(one: Overview) -> tuple[Any, ...]:
    """Return the values whose change is worth a new line: everything except ages."""
    nodes = tuple((node.node, node.phase, tuple(sorted(node.ranks.items()))) for node in one.nodes)
    return one.phase, one.attempt, one.step, one.checkpoint_step, one.restarts, one.controller, nodes


def _facts(one: Overview) -> Iterator[str]:
    yield f"attempt {one.attempt}"
    if one.restarts:
        yield plural(one.restarts, "restart")
    if one.step is not None:
        yield f"step {one.step}" + (f"/{one.steps}" if one.steps else "")
    if one.loss is not None:
        yield f"loss {one.loss:.4f}"
    if one.tokens_per_second:
        yield f"{count(one.tokens_per_second)} tokens/s"
    if one.step_age is not None and one.phase == "running":
        yield f"last step {duration(one.step_age)} ago"
    if one.checkpoint_age is not None:
        yield f"checkpoint of step {one.checkpoint_step} {duration(one.checkpoint_age)} ago"
    if one.left is not None:
        yield f"{duration(one.left)} left"


def _nodes(one: Overview) -> tuple[list[str], list[list[object]]]:
    rows = []
    for node in one.nodes:
        phase = Text(node.phase, style=STYLE.get(node.phase, ""))
        age = "" if node.step_age is None or node.phase != "running" else duration(node.step_age)
        rows.append(
            [node.node, phase, _states(node), node.step if node.step is not None else "", age, node.reason]
        )
    return ["NODE", "PHASE", "RANKS", "STEP", "AGE", ""], rows


def _states(node: NodeView) -> str:
    return ", ".join(f"{number} {state}" for state, number in sorted(node.ranks.items()))


def _is_odd(rank: RankState) -> bool:
    return rank.state is RankPhase.EXITED and bool(rank.exit_code or rank.signal)


def _rank(rank: RankState, times: float | None = None) -> list[object]:
    state = state_of_rank(rank)
    ended = state if state == UNSEEN or rank.state is not RankPhase.EXITED else how_it_ended(rank)
    ended += (
        f", a step takes it {times:.1f} times as long as the others" if times and state == "running" else ""
    )
    step = rank.step
    places = [rank.rank, rank.node, "" if rank.device is None else rank.device, rank.pid or ""]
    return [*places, "" if step is None else step, ended]


def _event(event: Mapping[str, Any]) -> str:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(float(event.get("time") or 0)))
    return f"{when}  {escape_controls(str(event['text']))}"
