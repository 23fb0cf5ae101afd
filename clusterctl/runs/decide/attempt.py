"""What the controller does about one attempt: which nodes are lost, when it is over, and which ranks must be ended.

To end ranks is an intent, not a message: each node that has ranks to end is `due` until it has answered, over broken
connections and failed requests. A later intent (the user's `stop`) replaces an earlier one (the failure of a node).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clusterctl.agent.frames import ALL_BEAT, SILENCE
from clusterctl.jobs.phase import Phase

# Seconds after its connection broke until a node counts as lost.
PATIENCE = 60.0
# The same if no node answers at all: then this machine's own link is probably broken, and the run continues.
ALONE = 600.0
# A node that was never reached counts as lost this many seconds earlier than a node that stops answering: a start takes
# that long.
SOONER = 3.0
# After these seconds of silence, two nodes are treated as hit by the same outage: when the first one is given up, the
# other may have answered the last beat.
QUIET = SILENCE - ALL_BEAT
# Seconds of grace for the other nodes when one has failed: ranks that wait for a dead one cannot save a checkpoint.
FAILED_GRACE = 5.0
# Seconds between two checks for nodes that have been away for too long.
LOOK = 0.2
# Seconds before a connection that broke is opened again, and before a request to stop that failed is repeated.
RETRY = 1.0
# Seconds that `stop` has to reach the nodes before the controller sends its request to those that still run.
OBEY = 3.0
# Seconds between two checks which show that this machine was suspended, and not the nodes.
ASLEEP = 4.5
# Seconds between two requests to the spare nodes.
AGAIN = 2.0


@dataclass(frozen=True)
class Hang:
    """All ranks were silent for too long. `rank` is the one that wrote last."""

    node: str
    rank: int
    seconds: float

    def as_failure(self) -> dict[str, object]:
        """Return the failure that its node records."""
        return {"rank": self.rank, "hang": self.seconds, "silent": True}


@dataclass(frozen=True)
class StopRequest:
    """How the ranks of a run are ended."""

    grace: float
    abort: bool = False
    """Let ranks that can write their stacks do so at their end."""
    hang: Hang | None = None
    """Recorded as the failure of its node."""


@dataclass(frozen=True)
class Attempt:
    """What the controller knows of an attempt."""

    nodes: frozenset[str]
    away: Mapping[str, float] = field(hash=False)
    """By node without a connection: since when it has none."""
    patience: float = PATIENCE
    grace: float = FAILED_GRACE
    """Seconds of grace after a failure."""
    has_spares: bool = False
    only_reads: bool = False
    """What exists is copied: nothing is recorded, and no ranks are ended."""
    ends: Mapping[str, Phase] = field(default_factory=dict, hash=False)
    nameless: frozenset[str] = frozenset()
    """Nodes of which this machine could not look up the address."""
    reported: frozenset[str] = frozenset()
    """Nodes whose broken connection was reported."""
    orphaned: frozenset[str] = frozenset()
    """Nodes that answer, and whose supervisor is dead: only a request ends the ranks there."""
    stuck: Mapping[str, int] = field(default_factory=dict, hash=False)
    """By node, how many reports in a row said that its supervisor does not respond."""
    alone: bool = False
    """No node answers, probably because this machine's own link is broken."""
    spare_answers: bool = False
    """Whether a spare node has answered since no other node does."""
    ticked: float = float("inf")
    """When the last Tick was."""
    asked_spares: float | None = None
    """When the spare nodes were asked; infinite until they have answered."""
    request: StopRequest | None = None
    """How ranks are ended; None while none must be."""
    by_user: bool = False
    rolling: bool = False
    """The roll is called before the request is sent."""
    due: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By node whose ranks must be ended: when the request is sent there."""
    asked: frozenset[str] = frozenset()
    """Nodes that have the request and have not answered yet."""
    obeyed: frozenset[str] = frozenset()
    """Nodes that have answered it: their ranks are ended."""

    @property
    def is_over(self) -> bool:
        """Return True if each node has ended, and the ranks of dead supervisors where their nodes can be reached."""
        if len(self.ends) < len(self.nodes):
            return False
        return not self.asked and not self.rolling and not any(name not in self.away for name in self.due)

    @property
    def left(self) -> frozenset[str]:
        """Return the lost nodes on which ranks may still run."""
        return frozenset(name for name, phase in self.ends.items() if phase is Phase.LOST) - self.obeyed


# -- events


@dataclass(frozen=True)
class Reached:
    """A connection to these nodes was opened."""

    names: frozenset[str]


@dataclass(frozen=True)
class Broken:
    """A node has no connection, since the time of its last byte; or none could be opened."""

    name: str
    since: float
    reason: str
    is_nameless: bool = False


@dataclass(frozen=True)
class Ended:
    """The attempt has ended on these nodes; LOST if their supervisor is dead."""

    names: frozenset[str]
    phase: Phase


@dataclass(frozen=True)
class Failed:
    """A rank has failed; `hang` is set if it hung for so many seconds."""

    name: str
    rank: int
    hang: float | None = None


@dataclass(frozen=True)
class Stuck:
    """A node reports how long its supervisor has been silent."""

    name: str
    silent: float
    limit: float
    words: str


@dataclass(frozen=True)
class Hung:
    """No rank has written anything for so long."""

    hang: Hang


@dataclass(frozen=True)
class StopAsked:
    """The user asked to stop the run."""

    request: StopRequest


@dataclass(frozen=True)
class Rolled:
    """The roll was called; `request` names the rank to blame."""

    request: StopRequest


@dataclass(frozen=True)
class Answered:
    """Nodes answered the request to end their ranks, or could not be asked."""

    names: frozenset[str]
    missed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SparesAsked:
    """The spare nodes were asked whether they answer."""

    answered: bool


@dataclass(frozen=True)
class Tick:
    """Time has passed; `quiet`: seconds since the last byte of any connected node that still runs."""

    quiet: float


Event = Reached | Broken | Ended | Failed | Stuck | Hung | StopAsked | Rolled | Answered | SparesAsked | Tick

# -- actions


@dataclass(frozen=True)
class Say:
    """Tell the user; of a node if it has a name."""

    text: str
    name: str = ""


@dataclass(frozen=True)
class Note:
    """Record what happened to a node: `failed` with its rank, or `node_ended` with its phase."""

    kind: str
    name: str
    fact: int | Phase


@dataclass(frozen=True)
class Lose:
    """Report a node as lost, with the reason."""

    name: str
    text: str


@dataclass(frozen=True)
class Dial:
    """Open the connection of a node again after RETRY seconds."""

    name: str


@dataclass(frozen=True)
class CallRoll:
    """Call the roll after so many seconds of silence, then send the request."""

    seconds: float
    request: StopRequest


@dataclass(frozen=True)
class SendStop:
    """Ask nodes to end their ranks."""

    names: frozenset[str]
    request: StopRequest


@dataclass(frozen=True)
class AskSpares:
    """Ask whether the spare nodes answer."""


Action = Say | Note | Lose | Dial | CallRoll | SendStop | AskSpares


def begin(nodes: frozenset[str], since: float, **more: object) -> Attempt:
    """Return the state in which no node was reached; `since`: when the attempt began."""
    return Attempt(nodes, dict.fromkeys(sorted(nodes), since + SILENCE - SOONER), **more)  # type: ignore[arg-type]


def step(state: Attempt, event: Event, now: float) -> tuple[Attempt, list[Action]]:
    """Return the state after an event, and what must be done."""
    state, actions = _HANDLERS[type(event)](state, event, now)
    state, sent = _send_due(state, now)
    return state, actions + sent


def _reached(state: Attempt, event: Reached, now: float) -> tuple[Attempt, list[Action]]:
    away = {name: since for name, since in state.away.items() if name not in event.names}
    state = replace(state, away=away, nameless=state.nameless - event.names)
    # A node that was away when the others were stopped is asked as soon as it answers.
    due = {name: now if name in event.names else at for name, at in state.due.items()}
    return replace(state, due=due), []


def _broken(state: Attempt, event: Broken, now: float) -> tuple[Attempt, list[Action]]:
    name, actions = event.name, list[Action]()
    nameless = state.nameless | {name} if event.is_nameless else state.nameless - {name}
    if name not in state.away or name not in state.reported:
        since = min(event.since, state.away.get(name, event.since))
        state = replace(state, away={**state.away, name: since}, reported=state.reported | {name})
        actions.append(Say(f"{event.reason}; trying again", name))
    return replace(state, nameless=nameless), [*actions, Dial(name)]


def _ended(state: Attempt, event: Ended, now: float) -> tuple[Attempt, list[Action]]:
    # A node that counted as lost and answers again stays lost: the attempt continues without it.
    names = event.names - state.ends.keys()
    if event.phase is Phase.LOST:
        state = replace(state, orphaned=state.orphaned | names)
    actions = list[Action]()
    for name in sorted(names):
        state, more = _end_node(state, name, event.phase, now)
        actions += more
    return state, actions


def _end_node(state: Attempt, name: str, phase: Phase, now: float) -> tuple[Attempt, list[Action]]:
    due = {other: at for other, at in state.due.items() if other != name}
    if phase is Phase.LOST and state.request is not None and name not in state.asked:
        # Its ranks may live: they are ended when it answers.
        due[name] = now
    state = replace(state, ends={**state.ends, name: phase}, due=due)
    if state.only_reads:
        return state, []
    actions: list[Action] = [Note("node_ended", name, phase)]
    if phase is not Phase.FINISHED:
        state, more = _stop_rest(state, name, None, None, now)
        actions += more
    return state, actions


def _stop_rest(
    state: Attempt, failed: str, hung: float | None, hang: Hang | None, now: float
) -> tuple[Attempt, list[Action]]:
    """End the ranks on the other nodes; on the failed one too if its supervisor or its connection is gone.

    Only the first failure counts. `hung`: for how many seconds ranks hang; a roll call of all nodes comes first.
    """
    if state.request is not None:
        return state, []
    names = (state.nodes - state.ends.keys() - {failed}) | state.left
    request = StopRequest(state.grace, hang=hang)
    if not names:
        return state, []
    state = replace(state, request=request, due=dict.fromkeys(names, now), rolling=hung is not None)
    return state, [CallRoll(hung, request)] if hung is not None else []


def _failed(state: Attempt, event: Failed, now: float) -> tuple[Attempt, list[Action]]:
    if state.only_reads:
        return state, []
    # After a hang the failed node keeps its ranks for the roll call, and is asked to end them too.
    state, actions = _stop_rest(state, "" if event.hang is not None else event.name, event.hang, None, now)
    return state, [Note("failed", event.name, event.rank), *actions]


def _stuck(state: Attempt, event: Stuck, now: float) -> tuple[Attempt, list[Action]]:
    """Give up an attempt on a node whose supervisor does not respond: no process there would stop its ranks.

    Two reports in a row are needed: after a pause of the whole machine, the first one may be wrong.
    """
    count = state.stuck.get(event.name, 0) + (event.silent >= event.limit)
    state = replace(state, stuck={**state.stuck, event.name: count})
    if count < 2 or event.name in state.ends or state.only_reads:
        return state, []
    state = replace(state, orphaned=state.orphaned | {event.name})
    text = f"{event.name}: the supervisor does not respond: {event.words}; its ranks are ended"
    state, actions = _end_node(state, event.name, Phase.LOST, now)
    return state, [*actions, Lose(event.name, text)]


def _hung(state: Attempt, event: Hung, now: float) -> tuple[Attempt, list[Action]]:
    if state.request is not None or state.only_reads or state.away.keys() - state.ends.keys():
        return state, []
    return _stop_rest(state, "", event.hang.seconds, event.hang, now)


def _stop_asked(state: Attempt, event: StopAsked, now: float) -> tuple[Attempt, list[Action]]:
    if state.by_user or state.only_reads:
        return state, []
    names = (state.nodes - state.ends.keys()) | state.due.keys() | state.asked
    # `stop` asks the nodes that it reaches; a node that comes back is asked immediately.
    due = {name: now if name in state.away else now + OBEY for name in names}
    state = replace(state, request=event.request, by_user=True, rolling=False)
    return replace(state, due=due, asked=frozenset()), []


def _rolled(state: Attempt, event: Rolled, now: float) -> tuple[Attempt, list[Action]]:
    return (replace(state, rolling=False, request=event.request) if state.rolling else state), []


def _answered(state: Attempt, event: Answered, now: float) -> tuple[Attempt, list[Action]]:
    state = replace(state, obeyed=state.obeyed | event.names)
    missed = (event.missed & state.asked) - (state.ends.keys() - state.left)
    due = {**state.due, **dict.fromkeys(missed, now + RETRY)}
    return replace(state, asked=state.asked - event.names - event.missed, due=due), []


def _spares_asked(state: Attempt, event: SparesAsked, now: float) -> tuple[Attempt, list[Action]]:
    if event.answered and not state.spare_answers:
        # Our own link may have been broken until now: the time of each node starts again.
        away = {name: since if name in state.ends else now for name, since in state.away.items()}
        state = replace(state, alone=False, away=away)
    return replace(state, spare_answers=event.answered, asked_spares=now), []


def _send_due(state: Attempt, now: float) -> tuple[Attempt, list[Action]]:
    """Send the request to each node that is due and has a connection."""
    if state.request is None or state.rolling or not state.due:
        return state, []
    names = frozenset(name for name, at in state.due.items() if at <= now and name not in state.away)
    if not names:
        return state, []
    due = {name: at for name, at in state.due.items() if name not in names}
    return replace(state, due=due, asked=state.asked | names), [SendStop(names, state.request)]


def _tick(state: Attempt, event: Tick, now: float) -> tuple[Attempt, list[Action]]:
    """Give up nodes that have been away for too long; if no node answers at all, that takes much longer."""
    if now - state.ticked > ASLEEP:
        # This process was suspended: no node could be reached meanwhile.
        asleep = now - state.ticked
        state = replace(state, away={name: min(since + asleep, now) for name, since in state.away.items()})
    state = replace(state, ticked=now)
    away = {name: since for name, since in state.away.items() if since <= now and name not in state.ends}
    if not away:
        return replace(state, spare_answers=False), []
    actions, patience = list[Action](), state.patience
    someone = event.quiet < QUIET
    if state.alone and someone:
        # Our own link was broken: the time of each node starts again.
        return replace(state, alone=False, away={**state.away, **dict.fromkeys(away, now)}), []
    # A look-up that fails is this machine's fault, and says nothing about the node.
    limits = {name: max(ALONE, patience) if name in state.nameless else patience for name in away}
    overdue = [name for name, since in away.items() if now - since > limits[name] - LOOK]
    if someone:
        state = replace(state, spare_answers=False)
    elif not state.spare_answers:
        if state.has_spares and (state.asked_spares is None or now > state.asked_spares + AGAIN):
            state = replace(state, asked_spares=float("inf"))
            actions.append(AskSpares())
        patience = max(ALONE, patience)
        if overdue and not state.alone:
            text = "no node answers: this machine's own link may be broken; the ranks continue meanwhile"
            actions.append(Say(text))
        state = replace(state, alone=bool(overdue))
    for name in overdue:
        limit = max(patience, limits[name])
        if now - away[name] > limit - LOOK:
            state, more = _end_node(replace(state, alone=False), name, Phase.LOST, now)
            actions += [*more, Lose(name, f"{name}: lost: it did not come back in {limit:g} s")]
    return state, actions


_HANDLERS: Mapping[type, Callable[[Attempt, Any, float], tuple[Attempt, list[Action]]]] = {
    Reached: _reached,
    Broken: _broken,
    Ended: _ended,
    Failed: _failed,
    Stuck: _stuck,
    Hung: _hung,
    StopAsked: _stop_asked,
    Rolled: _rolled,
    Answered: _answered,
    SparesAsked: _spares_asked,
    Tick: _tick,
}
