"""What a controller does from attempt to attempt: watch one, decide, wait, choose the nodes, start again.

Each process is a generator: it yields what must be done and receives the result, so that production and a simulation
carry out the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.inventory.cluster import Node
from clusterctl.jobs.restarts import Decision, Failure, History, Restart, decide, membership

# Why an attempt does not start after a request to stop.
STOPPED = "it was stopped"


@dataclass(frozen=True)
class Members:
    """The nodes of a run."""

    nodes: tuple[Node, ...]
    spares: tuple[Node, ...] = ()
    full: int = 0
    """How many nodes the run began with."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    failure: Failure | None
    """None if the attempt finished."""
    silent: frozenset[str] = frozenset()
    """Nodes that do not answer."""
    left: frozenset[str] = frozenset()
    """Nodes on which ranks may still run."""
    grows: bool = False
    """The controller ended it in order to use more nodes."""


@dataclass(frozen=True)
class Watch:
    """Watch the attempt to its end; the result is an Ended."""


@dataclass(frozen=True)
class Announce:
    """Tell what was decided after a failure, before the wait; the result is why no attempt can start, or ""."""

    decision: Decision
    before: History


@dataclass(frozen=True)
class Wait:
    """Wait; the result is False if a stop was requested."""

    seconds: float
    why: str


@dataclass(frozen=True)
class ReadMembers:
    """The result is the Members of the run now: an abandoned node that answers has become a spare."""


@dataclass(frozen=True)
class Clear:
    """End what is left of the last attempt on these nodes; the result is the names of those that answered."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class CheckSpares:
    """The result is the names of the spare nodes that answer and have what was pushed for the run."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Start:
    """Start the next attempt on these nodes; the result is why that failed, or ""."""

    nodes: tuple[Node, ...]
    spares: tuple[Node, ...]


Step = Watch | Announce | Wait | ReadMembers | Clear | CheckSpares | Start
Fits = Callable[[Sequence[Node]], bool]


@dataclass(frozen=True)
class Conclusion:
    """How a run ends."""

    verdict: str
    attempt: Ended


def control(policy: Restart, history: History, fits: Fits) -> Generator[Step, Any, Conclusion]:
    """Yield the steps of a controller; return the conclusion. `fits`: whether the job can run on some nodes."""
    while True:
        ended: Ended = yield Watch()
        if ended.failure is None:
            return Conclusion("", ended)
        decision = Decision(True, "", history=history)
        if not ended.grows:
            decision = decide(policy, history, ended.failure)
        while decision.again:
            # A run that is ended in order to use more nodes has not failed, and is not announced.
            if decision.why and (reason := (yield Announce(decision, history))):
                # The next attempt would fail to start, again and again: this does not count as a restart.
                return Conclusion(f"not restarted: {reason}", ended)
            history = decision.history
            reason = yield from _start_again(policy, decision, ended.silent, fits)
            if not reason:
                break
            failure = Failure(
                f"the next attempt could not start: {reason}",
                step=ended.failure.step,
                seconds=ended.failure.seconds,
                trains=ended.failure.trains,
                stopped=reason == STOPPED,
                awaited=ended.failure.awaited,
            )
            decision = decide(policy, history, failure)
        else:
            return Conclusion(decision.why, ended)


def _start_again(
    policy: Restart, decision: Decision, silent: Collection[str], fits: Fits
) -> Generator[Step, Any, str]:
    """Wait, choose the nodes and start; return why that failed, or ""."""
    if not (yield Wait(decision.wait, decision.why)):
        return STOPPED
    members: Members = yield ReadMembers()
    replaceable = bool(members.spares) or policy.min_nodes is not None
    # A lost node is contacted again only if no other node can replace it: connecting to a dead machine takes 10 s or
    # more.
    wanted = tuple(node for node in members.nodes if not (replaceable and node.name in silent))
    answered: Collection[str] = yield Clear(wanted)
    lost = {node.name for node in members.nodes} - set(answered)
    nodes, spares = yield from choose((yield ReadMembers()), lost, policy, fits)
    if silent := lost & {node.name for node in nodes}:
        # What is left of the last attempt there must be ended first.
        return f"{', '.join(sorted(silent))}: no answer"
    return str((yield Start(tuple(nodes), tuple(spares))))


def choose(
    members: Members, lost: set[str], policy: Restart, fits: Fits
) -> Generator[Step, Any, tuple[list[Node], list[Node]]]:
    """Return the nodes of the next attempt, and the spares that are left."""
    if lost or len(members.nodes) < members.full:
        sound = yield CheckSpares(members.spares)
        lost = lost | ({node.name for node in members.spares} - set(sound))
    return membership(members.nodes, members.spares, lost, policy.min_nodes, fits, members.full)


def stop(is_over: bool) -> Generator[str, Any, list[str]]:
    """Yield the steps of the command `stop`; return the names of the nodes that it did not reach.

    `record` the request, so that no attempt follows; `attempt`: the result is the number of the present attempt; `send`
    the request to its nodes: the result is the names of those that did not answer; `await` the end that a controller
    records.
    """
    if not is_over:
        yield "record"
    while True:
        attempt = yield "attempt"
        missed: list[str] = yield "send"
        if not missed:
            yield "await"
        # Another attempt may have begun just before the stop was requested.
        if (yield "attempt") == attempt:
            return missed
