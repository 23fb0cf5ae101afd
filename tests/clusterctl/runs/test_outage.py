"""Whose link is gone when no node answers: the nodes that stand by decide."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import Unreachable
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.watching.stall import Outage
from clusterctl.runs.watching.watch import RunWatcher
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, Stream
from clusterctl.transport.link import PendingRequest
from tests.support.records import record_of

SPARE = Node("n3", "h3", "10.0.0.3")


class Answering(Connection):
    """A node that answers with its own name."""

    def call(self, op: str, params: object = None, body: object = None) -> dict[str, object]:
        assert op == "hello"
        return {}

    def open(self, op: str, params: object) -> PendingRequest:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Network:
    """A cluster whose nodes answer while `up`."""

    up = False

    def connect(self, node: Node) -> Connection:
        if not self.up:
            raise Unreachable(node.name, "no answer")
        return Answering(node.name)

    def start(self, node: Node, command: str) -> Stream:
        raise NotImplementedError


def wait_for(truth: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_nodes_that_stand_by_it_is_taken_for_our_own_link() -> None:
    assert Outage(Connections(Network()), []).is_ours()


def test_a_node_that_stands_by_and_answers_says_that_our_link_is_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clusterctl.runs.watching.stall.AGAIN", 0.05)
    network = Network()
    outage = Outage(Connections(network), [SPARE])
    assert outage.is_ours()
    time.sleep(0.2)
    # PendingRequest again and again, and answered by nobody.
    assert outage.is_ours()
    network.up = True
    wait_for(lambda: not outage.is_ours())
    monkeypatch.setattr("clusterctl.runs.watching.stall.AGAIN", 600.0)
    outage.again = time.monotonic() + 600.0
    outage.over()
    # The next call queries it again.
    assert outage.is_ours()


def test_a_lost_node_is_said_to_have_been_away_as_long_as_it_was(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_record(record_of({"a": [0]}))
    watch = RunWatcher(run, Connections(Network()), since=time.monotonic() - 1000.0)
    notes = [update.note for update in watch if update.ended]
    assert notes == ["a: lost: it did not come back in 600 s"]
