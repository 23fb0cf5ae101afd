"""Whose link is gone when no node answers: the nodes that stand by decide."""

from __future__ import annotations

import time
from pathlib import Path

from clusterctl.errors import Unreachable
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.decide.attempt import (
    AGAIN,
    ALONE,
    QUIET,
    AskSpares,
    Attempt,
    Lose,
    Reached,
    Say,
    SparesAsked,
    Tick,
    step,
)
from clusterctl.runs.watching.watch import RunWatcher
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, Stream
from tests.support.records import record_of

NODES = frozenset({"a", "b"})


class Network:
    """A cluster of which no node answers."""

    def connect(self, node: Node) -> Connection:
        raise Unreachable(node.name, "no answer")

    def start(self, node: Node, command: str) -> Stream:
        raise NotImplementedError


def away(*, spares: bool) -> Attempt:
    """An attempt whose nodes have not answered since time 0."""
    return Attempt(NODES, dict.fromkeys("ab", 0.0), patience=5.0, has_spares=spares)


def test_without_spare_nodes_it_is_taken_for_our_own_link() -> None:
    state, actions = step(away(spares=False), Tick(float("inf")), 6.0)
    assert [type(action) for action in actions] == [Say] and state.alone and not state.ends
    for now in range(10, int(ALONE), 4):
        state, actions = step(state, Tick(float("inf")), now)
        assert not actions
    state, actions = step(state, Tick(float("inf")), ALONE)
    assert [action.text for action in actions if isinstance(action, Lose)] == [
        f"{name}: lost: it did not come back in 600 s" for name in "ab"
    ]


def test_a_spare_node_that_answers_says_that_our_link_is_fine() -> None:
    state, actions = step(away(spares=True), Tick(float("inf")), 6.0)
    assert [type(action) for action in actions] == [AskSpares, Say]
    # They are asked again only after they answered, or could not.
    state, actions = step(state, Tick(float("inf")), 10.0)
    assert not actions
    state, _ = step(state, SparesAsked(True), 10.1)
    state, _ = step(state, Tick(float("inf")), 14.0)
    assert not state.ends, "our link may have been broken until the spare node answered"
    state, _ = step(state, Tick(float("inf")), 15.2)
    assert set(state.ends) == NODES


def test_a_spare_node_that_answers_before_the_others_after_an_outage_ends_no_run() -> None:
    state, _ = step(away(spares=True), Tick(float("inf")), 6.0)
    state, _ = step(state, SparesAsked(False), 9.0)
    assert not step(state, Tick(float("inf")), 9.0 + AGAIN / 2)[1]
    state, actions = step(state, Tick(float("inf")), 9.1 + AGAIN)
    assert actions == [AskSpares()]
    state, _ = step(state, SparesAsked(True), 12.0)
    state, _ = step(state, Tick(float("inf")), 15.0)
    assert not state.ends, "each node has its time again"
    state, _ = step(state, Tick(float("inf")), 17.1)
    assert set(state.ends) == NODES


def test_a_launcher_that_was_suspended_gives_each_node_its_time_again() -> None:
    state, _ = step(away(spares=False), Tick(0.0), 1.0)
    state, _ = step(state, Tick(0.0), 800.0)
    assert not state.ends
    state, _ = step(state, Tick(0.0), 804.2)
    assert set(state.ends) == NODES


def test_when_our_link_is_back_the_time_of_each_node_starts_again() -> None:
    state, _ = step(away(spares=False), Tick(float("inf")), 6.0)
    state, _ = step(state, Reached(frozenset("a")), 100.0)
    state, actions = step(state, Tick(QUIET / 2), 100.1)
    assert not actions and not state.alone and state.away == {"b": 100.1}
    state, _ = step(state, Tick(QUIET / 2), 104.0)
    assert not state.ends
    state, _ = step(state, Tick(QUIET / 2), 105.2)
    assert set(state.ends) == {"b"}


def test_a_lost_node_is_said_to_have_been_away_as_long_as_it_was(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_record(record_of({"a": [0]}))
    watch = RunWatcher(run, Connections(Network()), since=time.monotonic() - 1000.0)
    notes = [update.note for update in watch if update.ended]
    assert notes == ["a: lost: it did not come back in 600 s"]
