"""What a supervisor does, and what a request to stop does: functions of a state, an event and the time.

They read no clock and no file, so that tests run them under a virtual clock.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import List, Mapping, Optional, Tuple

from clusterctl.agent.records import FINAL, PATIENCE

# Limit in seconds of the grace after a failure: ranks that wait for a dead one cannot save a checkpoint.
FAILED_GRACE = 5.0
# Seconds that ranks which hang are kept for the roll call of a controller, which takes up to 5 s.
HELD = 10.0
# Seconds for processes that a finished rank left behind.
SWEEP = 2.0
# Seconds without a heartbeat after which `stop` kills a supervisor: its longest pause is that of writing stacks.
UNRESPONSIVE = 15.0


@dataclass(frozen=True)
class Supervised:
    """The ranks of an attempt on one node, as their supervisor knows them."""

    ranks: Mapping[int, str] = field(hash=False)
    """By rank: `waiting`, `running` or `exited`."""
    grace: float
    stage: str = "running"
    """`running`, `ending`, `sweeping` or `over`."""
    failure: Optional[Mapping[str, object]] = field(default=None, hash=False)
    """The first failure."""
    found: float = 0.0
    """When the failure was found."""
    stopped: bool = False
    """A stop was requested."""

    @property
    def outcome(self) -> str:
        """Return how the attempt ended on this node."""
        failure = self.failure
        own = failure is not None and ("hang" in failure or "world" in failure)
        if own or (failure is not None and not self.stopped):
            return "failed"
        return "stopped" if self.stopped else "finished"


@dataclass(frozen=True)
class Event:
    """What happens to a supervisor.

    `began`: no rank is started yet. `started`, `exited`: a rank's process is running, has ended, or could not be
    started. `found`: a rank hangs, or its launcher did what the plan does not have. `stop` was requested. `looked`:
    time has passed. `ended`: the processes are ended, as far as that is possible.
    """

    kind: str
    rank: int = -1
    failure: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Empty if a rank's end was none."""
    grace: float = 0.0
    abort: bool = False
    """Of a request to stop: let ranks that can write their stacks do so."""


@dataclass(frozen=True)
class Action:
    """What a supervisor must do.

    `spawn` a rank; `save` the first failure, so that the other nodes are stopped; `abort`: let ranks that can write
    their stacks do so at their end; `save_stacks` of all ranks; `end` all processes; `finish`: record the end.
    """

    kind: str
    rank: int = -1
    grace: float = 0.0


Step = Tuple[Supervised, List[Action]]


def step(state: Supervised, event: Event, now: float) -> Step:
    """Return a supervisor's state after an event, and what it must do."""
    if event.kind in ("began", "started", "exited"):
        if event.rank in state.ranks:
            phase = "exited" if event.kind == "exited" else "running"
            state = replace(state, ranks={**state.ranks, event.rank: phase})
        if event.kind == "exited" and event.failure and state.failure is None and not state.stopped:
            return _failed(state, event.failure, now)
        return _go_on(state)
    if event.kind == "found" and state.failure is None and state.stage == "running":
        return _failed(state, _of_living(state, event.failure), now)
    if event.kind == "stop" and state.stage == "running":
        actions = [Action("abort")] if event.abort else []
        return replace(state, stopped=True, stage="ending"), [*actions, Action("end", grace=event.grace)]
    if event.kind == "ended":
        if state.stage == "ending":
            return replace(state, stage="sweeping"), [Action("end", grace=SWEEP)]
        return replace(state, stage="over"), [Action("finish")]
    held = event.kind == "looked" and state.failure is not None and "hang" in state.failure
    if held and state.stage == "running" and now - state.found >= HELD:
        # No controller has called the roll: the stacks are saved here.
        return _end(state, [Action("save_stacks")])
    return state, []


def _failed(state: Supervised, failure: Mapping[str, object], now: float) -> Step:
    state, actions = _go_on(replace(state, failure=failure, found=now))
    return state, [Action("save"), *actions]


def _of_living(state: Supervised, failure: Mapping[str, object]) -> Mapping[str, object]:
    """Return what was found; if its rank has ended meanwhile, it counts for the next one."""
    living = [rank for rank, phase in state.ranks.items() if phase != "exited"] or list(state.ranks)
    return failure if failure["rank"] in living else {**failure, "rank": living[0]}


def _end(state: Supervised, before: List[Action]) -> Step:
    return replace(state, stage="ending"), [*before, Action("end", grace=min(state.grace, FAILED_GRACE))]


def _go_on(state: Supervised) -> Step:
    """Start the next rank, or end all of them after a failure; sweep once none runs."""
    if state.stage != "running":
        return state, []
    if state.failure is not None and "hang" not in state.failure:
        return _end(state, [])
    waiting = [rank for rank, phase in state.ranks.items() if phase == "waiting"]
    if waiting and state.failure is None:
        return state, [Action("spawn", waiting[0])]
    if "running" not in state.ranks.values():
        return replace(state, stage="sweeping"), [Action("end", grace=SWEEP)]
    return state, []


# -- a request to stop


@dataclass(frozen=True)
class Seen:
    """What a request to stop sees of an attempt."""

    has_spec: bool
    """The attempt was started here, or is about to be."""
    lives: bool
    """Its supervisor lives."""
    phase: Optional[str] = None
    silent: Optional[float] = None
    """Seconds since the supervisor's last heartbeat; None before the first."""
    process: str = ""
    """The state of the supervisor's process, a letter of proc(5)."""


@dataclass(frozen=True)
class Stopping:
    """A request to stop an attempt on one node."""

    grace: float
    stage: str = "new"
    """`new`, `waiting`, `killed`, `sweeping` or `answered`."""
    began: float = 0.0
    stuck: Optional[Seen] = None
    """The supervisor as it was when it did not respond."""


def stop(state: Stopping, seen: Seen, now: float) -> "Tuple[Stopping, List[str]]":
    """Return the state of a request after a look, and what must be done, in this order.

    `record` the request, so that a start in progress sees it; `terminate` or `kill` the supervisor; `sweep` the ranks
    of a dead one; `answer`.
    """
    if state.stage == "new":
        actions = [] if seen.phase in FINAL else ["record"]
        if not seen.has_spec:
            return replace(state, stage="answered"), [*actions, "answer"]
        if seen.lives:
            stuck = seen if seen.process in ("T", "t") or (seen.silent or 0.0) > UNRESPONSIVE else None
            return replace(state, stage="waiting", began=now, stuck=stuck), [*actions, "terminate"]
        return replace(state, stage="sweeping"), actions
    if state.stage == "waiting":
        if not seen.lives or now - state.began > state.grace + UNRESPONSIVE + PATIENCE:
            return replace(state, stage="sweeping"), []
        since = now - state.began
        if (since if seen.silent is None else min(seen.silent, since)) > UNRESPONSIVE:
            # One that hangs in a system call ends only when the call returns; its ranks need not wait for it.
            return replace(state, stage="killed", stuck=state.stuck or seen), ["kill"]
        return state, []
    gone = not seen.lives or state.stuck is not None
    sweep = ["sweep"] if gone and seen.phase not in FINAL else []
    return replace(state, stage="answered"), [*sweep, "answer"]
