"""Decide whether a failed run is started again, when, and on which nodes: a function of values."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from clusterctl.agent.frames import SILENCE
from clusterctl.inventory.cluster import Node
from clusterctl.settings import a_time
from clusterctl.wire.fields import Checked, Problem, setting

# Seconds: the longest wait before a restart.
LONGEST = 300.0
# Number of restarts in a row without a new step that ends a run.
STALLED = 3
# Number of times that a run starts again because another program took the port that was chosen for it.
PORTS = 3
# Seconds after which a program without steps counts as having made progress.
LIVED = 300.0
# Seconds of silence; a link itself notices silence after 10.
NODE_LOST_AFTER = 15.0
MISTAKE = re.compile(
    r"^(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError|clusterctl: cannot start)\b|"
    r"(unrecognized arguments|can't open file|No module named)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Restart(Checked):
    """The restarts that a job asks for."""

    max: int = setting(3, least=0)
    """Highest number of restarts; 0 means none."""
    backoff: float = a_time(10.0)
    """Seconds before a restart if the previous one brought no new step; each further one waits twice as long, up to
    five minutes. The first restart after a new step does not wait, unless a node has to come back for it."""
    spare_nodes: str | None = setting(None)
    """Node set that replaces lost nodes."""
    min_nodes: int | None = setting(None, least=1)
    """Continue with fewer nodes, down to so many. Default: the run needs all of them."""
    node_lost_after: float = a_time(NODE_LOST_AFTER)
    """Seconds after which a silent node counts as lost."""
    grow: str = setting("restart", choices=("restart", "checkpoint"))
    """When a run on fewer nodes uses a node that answers again: at the next restart, or at the next checkpoint."""

    def problems(self) -> Iterator[Problem]:
        if self.node_lost_after <= SILENCE:
            short = (
                f"{self.node_lost_after:g} s is too short: a silent connection is noticed after {SILENCE:g} s"
            )
            yield "node_lost_after", short, f"{NODE_LOST_AFTER:g}s, or more"


@dataclass(frozen=True)
class History:
    """The failures of a run so far."""

    restarts: int = 0
    stalled: int = 0
    """Restarts in a row that brought no new step."""
    step: int = 0
    """The last step that any attempt finished."""
    ports: int = 0
    """Starts with another port, which are no restarts."""


@dataclass(frozen=True)
class Failure:
    """The end of an attempt, as far as the decision needs it."""

    what: str
    """A description for the history."""
    step: int = 0
    seconds: float = 0.0
    """How long the attempt ran."""
    trains: bool = False
    exit_code: int | None = None
    log: str = ""
    """The end of the failed rank's log."""
    stopped: bool = False
    """A stop of the run was requested."""
    passes: str = ""
    """Why the same start may succeed later; empty for other failures."""
    port_taken: bool = False
    """Another program took the port that was chosen for the ranks."""
    mistaken: bool = False
    """Every other attempt would fail in the same way."""
    awaited: bool = False
    """A node that does not answer must come back, because no other node may replace it."""


@dataclass(frozen=True)
class Decision:
    """The decision after a failure."""

    again: bool
    why: str
    wait: float = 0.0
    history: History = History()


def decide(policy: Restart, history: History, failure: Failure) -> Decision:
    """Return whether to start again, with the reason in words."""
    got_on = failure.step > history.step or (not failure.trains and failure.seconds >= LIVED)
    now = replace(
        history,
        step=max(history.step, failure.step),
        stalled=0 if got_on or not history.restarts else history.stalled + 1,
    )
    if failure.stopped:
        return Decision(False, "", history=now)
    if failure.port_taken and not failure.step and history.ports < PORTS:
        why = f"started again with another port, which is no restart: {failure.what}"
        return Decision(True, why, history=replace(history, ports=history.ports + 1))
    if policy.max <= 0:
        return Decision(False, "", history=now)
    if not history.restarts and not failure.passes and is_mistake(failure):
        return Decision(False, "not restarted: it would fail again in the same way", history=now)
    if now.stalled >= STALLED:
        why = f"do not requeue: {STALLED} restarts brought no new step; the last failure: {failure.what}"
        return Decision(False, why, history=now)
    if now.restarts >= policy.max:
        spent = "the only restart is" if policy.max == 1 else f"all {policy.max} restarts are"
        return Decision(False, f"not restarted: {spent} used", history=now)
    doubled = now.stalled if failure.awaited else now.stalled - 1
    if failure.passes and not got_on:
        doubled = max(doubled, 0)
    wait = min(policy.backoff * 2**doubled, LONGEST) if doubled >= 0 else 0.0
    when = f"in {wait:g} s" if wait else "now"
    reason = f", because {failure.passes}" if failure.passes else ""
    why = f"restart {now.restarts + 1} of {policy.max} {when}{reason}: {failure.what}"
    return Decision(True, why, wait, replace(now, restarts=now.restarts + 1))


def is_mistake(failure: Failure) -> bool:
    """Return True if the first attempt ended as with an error in the program or its configuration.

    Before any step, and not by a signal.
    """
    if failure.mistaken:
        return True
    if not failure.exit_code or failure.step:
        return False
    return failure.trains or failure.exit_code in (126, 127) or bool(MISTAKE.search(failure.log))


def membership(
    nodes: Sequence[Node],
    spares: Sequence[Node],
    lost: Collection[str],
    least: int | None,
    fits: Callable[[Sequence[Node]], bool],
    full: int = 0,
) -> tuple[list[Node], list[Node]]:
    """Return the nodes of the next attempt, and the spares that are left.

    A spare takes the place of the lost node, so that the other nodes keep their ranks; more spares join at the end, up
    to the `full` number that the run began with. Without spares the remaining nodes continue, as many as `fits` allows,
    down to `least`. If that is not possible, the run must wait for its old nodes.
    """
    free = [node for node in spares if node.name not in lost]
    chosen: list[Node] = []
    for node in nodes:
        if node.name not in lost:
            chosen.append(node)
        elif free:
            chosen.append(free.pop(0))
    more = max(full - len(nodes), 0) if len(chosen) == len(nodes) else 0
    chosen, free = [*chosen, *free[:more]], free[more:]
    for count in range(len(chosen), (least or len(nodes)) - 1, -1):
        if count == len(nodes) or fits(chosen[:count]):
            return chosen[:count], [*chosen[count:], *free]
    return list(nodes), list(spares)
