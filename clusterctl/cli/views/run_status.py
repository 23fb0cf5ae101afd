"""Show the overview of a run: head lines, a table of nodes, unusual ranks, events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from clusterctl.cli.views import tables
from clusterctl.inventory.nodeset import fold
from clusterctl.jobs.run_lines import Event
from clusterctl.runs.causes.cause import Cause, how_it_ended
from clusterctl.runs.overview import UNSEEN, NodeView, Overview, event_text, state_of_rank
from clusterctl.runs.state import RankPhase, RankState
from clusterctl.text import count, duration, escape_controls, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

# Up to this many ranks all are shown; of more, only failed and slow ones.
ALL_RANKS = 16
# Columns that a program which reports no steps leaves empty.
STEPS = ("STEP", "AGE")
STYLE = {**tables.PHASE_STYLE, "restarting": "yellow", "unknown": "yellow"}


def whole(overview: Overview, *, all_ranks: bool = False) -> Group:
    """Return the whole overview; of a large run only unusual ranks, unless `all_ranks` is set."""
    parts: list[RenderableType] = [head(overview), _table(*_nodes(overview))]
    few = all_ranks or len(overview.ranks) <= ALL_RANKS
    ranks = [rank for rank in overview.ranks if few or _is_odd(rank) or rank.rank in overview.slow]
    if ranks:
        rows = [
            _rank(rank, overview.slow.get(rank.rank)) for rank in sorted(ranks, key=lambda rank: rank.rank)
        ]
        parts.append(_table(["RANK", "NODE", "DEVICE", "PID", "STEP", "STATE"], rows))
    if overview.damaged:
        parts.append(Text("\n".join(map(escape_controls, overview.damaged)), style="yellow"))
    if overview.events:
        parts.append(Text("\n".join(_event(event) for event in overview.events), style="dim"))
    spaced = [piece for part in parts for piece in (part, Text(""))]
    return Group(*spaced[:-1])


def head(overview: Overview) -> Text:
    """Return the first lines: phase, attempt, step, loss, speed, ages, root cause."""
    text = Text.assemble((overview.run, "bold"), "  ", (overview.phase, STYLE.get(overview.phase, "")))
    text.append("".join(f"  {part}" for part in _facts(overview)))
    if overview.is_newer:
        # Only its own version can control it.
        text.append("\na newer version of clusterctl started this run; ", style="yellow")
        text.append("this version shows and stops it: update clusterctl to attach or resume")
    elif overview.controller is None and overview.phase in ("running", "restarting", "unknown"):
        text.append("\nthis run has no controller; ", style="yellow")
        text.append(f"start one with: clusterctl attach {overview.run}")
    elif overview.controller is None and not overview.is_copied:
        text.append("\nit ended without a controller, and its last output is on the nodes; ", style="yellow")
        text.append(f"copy it with: clusterctl attach {overview.run}")
    away = [node.node for node in overview.nodes if node.phase == "unknown"]
    if away and overview.phase in ("running", "restarting", "unknown"):
        text.append(f"\n{fold(away)}: no answer; ", style="yellow")
        text.append("the run counts as lost after at most 10 minutes; ")
        text.append(f"then start it elsewhere with: clusterctl resume {overview.run} --nodes SET")
    if overview.left_behind:
        text.append(f"\n{escape_controls(overview.left_behind)}", style="yellow")
    if overview.cause:
        text.append(f"\nroot cause: {escape_controls(overview.cause.title)}", style="red")
        text.append("".join(f"\n  {escape_controls(line)}" for line in _about(overview.cause)))
    if overview.verdict:
        text.append(f"\n{escape_controls(overview.verdict)}", style="yellow")
    return text


def _about(cause: Cause) -> Iterator[str]:
    """Yield the consequences of a root cause, a remedy, and the path of its log."""
    for word, text in (("", cause.others), ("try: ", cause.hint), ("log: ", cause.log)):
        if text:
            yield f"{word}{text}"


def line(overview: Overview) -> str:
    """Return the overview as one line, for use without a terminal."""
    newer = ["started by a newer version of clusterctl"] * overview.is_newer
    return "  ".join([time.strftime("%H:%M:%S"), overview.run, overview.phase, *_facts(overview), *newer])


def changes(overview: Overview) -> tuple[Any, ...]:
    """Return the values whose change needs a new line: all except ages."""
    nodes = tuple((node.node, node.phase, tuple(sorted(node.ranks.items()))) for node in overview.nodes)
    return (
        overview.phase,
        overview.attempt,
        overview.step,
        overview.checkpoint_step,
        overview.restarts,
        overview.controller,
        nodes,
    )


def _facts(overview: Overview) -> Iterator[str]:
    yield f"attempt {overview.attempt}"
    if overview.restarts:
        yield plural(overview.restarts, "restart")
    if overview.step is not None:
        yield f"step {overview.step}" + (f"/{overview.steps}" if overview.steps else "")
    if overview.loss is not None:
        yield f"loss {overview.loss:.4f}"
    if overview.tokens_per_second:
        yield f"{count(overview.tokens_per_second)} tokens/s"
    if overview.step_age is not None and overview.phase == "running":
        yield f"last step {duration(overview.step_age)} ago"
    if overview.checkpoint_age is not None:
        yield f"checkpoint of step {overview.checkpoint_step} {duration(overview.checkpoint_age)} ago"
    if overview.left is not None:
        yield f"{duration(overview.left)} left"


def _table(names: list[str], rows: list[list[object]]) -> RenderableType:
    """Return a table without the columns about steps if no row has a value in them."""
    shown = [at for at, name in enumerate(names) if name not in STEPS or any(str(row[at]) for row in rows)]
    cells = [[row[at] for at in shown] for row in rows]
    return tables.table([names[at] for at in shown], cells, right=["RANK", "PID", *STEPS])


def _nodes(overview: Overview) -> tuple[list[str], list[list[object]]]:
    rows = []
    for node in overview.nodes:
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
    ended += f", straggler: {times:.1f}x slower than the others" if times and state == "running" else ""
    step = rank.step
    places = [rank.rank, rank.node, "" if rank.device is None else rank.device, rank.pid or ""]
    return [*places, "" if step is None else step, ended]


def _event(event: Event) -> str:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time))
    return f"{when}  {escape_controls(event_text(event))}"
