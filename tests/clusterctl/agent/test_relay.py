from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.files import peer, tree
from clusterctl.agent.files import relay as agent_relay
from clusterctl.agent.files.relay import LENGTH
from clusterctl.agent.files.tree import Range
from clusterctl.errors import ClusterctlError
from clusterctl.transfer.push import (
    PushResult,
    Source,
    make_manifest,
    push_tree,
)
from clusterctl.transfer.relay import HOPELESS, Relay
from clusterctl.transport.connection import Connection
from tests.support.nodes import connect, local_node, oldest_python, wait_for

ROOT = Path(__file__).resolve().parents[3]
SIZE = 12_000_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


class Nodes:
    """Some agents on this machine, each with a folder of its own."""

    def __init__(self, folder: Path, count: int, python: str = sys.executable) -> None:
        self.folders = [folder / f"node{number}" for number in range(count)]
        for one in self.folders:
            one.mkdir()
        self.nodes = [local_node(one, one.name) for one in self.folders]
        self.links: list[Connection] = [connect(one, python) for one in self.folders]
        for node, link in zip(self.nodes, self.links, strict=True):
            link.node = node.name

    def push(self, source: Source, relay: Relay, pause: float = 0.0) -> list[PushResult | ClusterctlError]:
        """To all of them at once, each beginning a little after the one before."""
        results: dict[int, PushResult | ClusterctlError] = {}

        def one(number: int) -> None:
            time.sleep(number * pause)
            dest = str(self.folders[number] / "dest")
            try:
                results[number] = push_tree(self.links[number], source, dest, relay=relay)
            except ClusterctlError as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(self.links))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[number] for number in range(len(self.links))]

    def close(self) -> None:
        for one in self.links:
            one.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    there: list[Nodes] = []

    def make(count: int) -> Nodes:
        there.append(Nodes(tmp_path, count))
        return there[-1]

    yield make
    for one in there:
        one.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "big").write_bytes(os.urandom(SIZE))
    for number in range(300):
        (root / f"small{number}").write_text(f"small {number}" * (number % 50))
    return root


class SlowSource(Source):
    """A launcher whose own line is slow; what it sends besides is counted."""

    def __init__(self, root: Path, seconds: float) -> None:
        super().__init__(root, make_manifest(root))
        self._pause = seconds / (self.manifest.size / (128 << 10))
        self.at_half = threading.Event()
        self._sent = 0

    def send(self, ranges: list[Range], send: Callable[[bytes], None]) -> tuple[str, ...]:
        def slowly(data: bytes) -> None:
            time.sleep(self._pause)
            send(data)
            self._sent += len(data)
            if self._sent > self.manifest.size / 2:
                self.at_half.set()

        return super().send(ranges, slowly)


def same(one: Path, two: Path) -> bool:
    return tree.scan(str(one))[0] == tree.scan(str(two))[0]


def good(results: list[PushResult | ClusterctlError]) -> list[PushResult]:
    assert all(isinstance(one, PushResult) for one in results), results
    return [one for one in results if isinstance(one, PushResult)]


@pytest.mark.parametrize("plain", [False, True])
def test_one_copy_leaves_the_launcher_and_every_node_has_it_all(
    made: Callable[[int], Nodes], root: Path, plain: bool
) -> None:
    nodes = made(4)
    source = SlowSource(root, 1.0)
    relay = Relay(nodes.nodes, plain)
    results = good(nodes.push(source, relay, pause=0.1))
    ports = [port for _, port in relay.members]
    assert len(ports) == 4
    relay.release()
    assert all(same(root, one / "dest") for one in nodes.folders)
    assert sum(one.bytes_sent for one in results) == source.manifest.size
    assert sum(one.bytes_relayed for one in results) == 3 * source.manifest.size
    # Nobody listens any more.
    for port in ports:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), 1.0)
    assert not any(list((one / "work").glob("tmp/*")) for one in nodes.folders)


@pytest.mark.skipif(oldest_python() is None, reason="no Python 3.8 here")
@pytest.mark.parametrize("plain", [False, True])
def test_nodes_with_the_oldest_python_relay_too(tmp_path: Path, root: Path, plain: bool) -> None:
    nodes = Nodes(tmp_path, 2, str(oldest_python()))
    source = Source(root, make_manifest(root))
    relay = Relay(nodes.nodes, plain)
    results = good(nodes.push(source, relay))
    relay.release()
    nodes.close()
    assert all(same(root, one / "dest") for one in nodes.folders)
    assert sum(one.bytes_sent for one in results) == source.manifest.size


def test_a_node_that_has_some_of_it_gets_and_gives_the_rest(made: Callable[[int], Nodes], root: Path) -> None:
    nodes = made(3)
    push_tree(nodes.links[0], Source(root, make_manifest(root)), str(nodes.folders[0] / "dest"))
    (root / "deep" / "new").write_bytes(os.urandom(5_000_000))
    source = SlowSource(root, 0.5)
    relay = Relay(nodes.nodes, always=True)
    results = good(nodes.push(source, relay, pause=0.3))
    relay.release()
    # The new file comes from here, or from a node that has it already: whichever is faster.
    assert results[0].bytes_sent + results[0].bytes_relayed == 5_000_000
    assert results[1].bytes_sent + results[1].bytes_relayed == source.manifest.size
    assert all(same(root, one / "dest") for one in nodes.folders)


def test_a_node_that_dies_in_the_middle_stops_nobody_else(made: Callable[[int], Nodes], root: Path) -> None:
    nodes = made(4)
    source = SlowSource(root, 3.0)
    relay = Relay(nodes.nodes)
    victim = nodes.links[1].hello().pid

    def kill() -> None:
        source.at_half.wait()
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    results = nodes.push(source, relay, pause=0.2)
    relay.release()
    assert isinstance(results[1], ClusterctlError) and "node1" not in dict(relay.members)
    alive = good([results[place] for place in (0, 2, 3)])
    assert all(same(root, nodes.folders[place] / "dest") for place in (0, 2, 3))
    assert any("node1" in note for one in alive for note in one.notes)
    # The next one turned to another node, not to the launcher.
    assert sum(one.bytes_sent for one in alive) < 2 * source.manifest.size


def test_when_the_first_node_dies_the_next_one_asks_the_launcher(
    made: Callable[[int], Nodes], root: Path
) -> None:
    nodes = made(3)
    source = SlowSource(root, 3.0)
    relay = Relay(nodes.nodes)
    victim = nodes.links[0].hello().pid

    def kill() -> None:
        source.at_half.wait()
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    results = nodes.push(source, relay, pause=0.2)
    relay.release()
    assert isinstance(results[0], ClusterctlError)
    rest = good(results[1:])
    assert all(same(root, nodes.folders[place] / "dest") for place in (1, 2))
    # Pieces that had arrived were not requested again.
    assert sum(one.bytes_sent for one in rest) < source.manifest.size


class Misled(Relay):
    """Nodes that are sent to a place where no node of the transfer answers."""

    port = 9

    def join(self, node: str, port: int) -> list[dict[str, Any]]:
        super().join(node, port)
        return [{"node": "elsewhere", "address": "127.0.0.1", "port": self.port}]


def test_nodes_that_reach_no_other_get_it_directly_and_it_is_said(
    made: Callable[[int], Nodes], root: Path
) -> None:
    nodes = made(2)
    relay = Misled(nodes.nodes)
    results = good(nodes.push(Source(root, make_manifest(root)), relay))
    relay.release()
    assert all(same(root, one / "dest") for one in nodes.folders)
    assert all("elsewhere" in one.notes[0] and one.bytes_relayed == 0 for one in results)


def test_after_some_that_reached_none_nobody_is_sent_to_another(tmp_path: Path) -> None:
    names = [f"node{number}" for number in range(9)]
    relay = Relay([local_node(tmp_path, name) for name in names])
    for name in names[:HOPELESS]:
        relay.join(name, 1)
        relay.record(0, 2)
    assert relay.join("node8", 1) == []
    # One reached another after all.
    relay.record(5, 0)
    assert relay.join("node7", 1) != []


class Liar:
    """A node of a plain transfer that gives bytes of its own."""

    def __init__(self, relay: Relay, source: Source) -> None:
        self.terms = relay.terms("node0", SIZE)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sizes = [one.size for one in source.manifest.files]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self.listener.accept()
        stream = agent_relay.opened(connection, self.terms, accepts=True)
        stream.read(LENGTH.unpack(stream.read(LENGTH.size))[0])
        size = min(self.sizes[0], tree.PIECE)
        stream.send(LENGTH.pack(size + 1) + bytes(size))
        time.sleep(0.5)
        connection.close()


def test_a_node_that_gives_other_bytes_is_left_and_nothing_of_it_stays(
    made: Callable[[int], Nodes], root: Path
) -> None:
    nodes = made(1)
    source = Source(root, make_manifest(root))
    relay = Misled(nodes.nodes, plain=True)
    liar = Liar(relay, source)
    relay.port = liar.port
    (result,) = good(nodes.push(source, relay))
    relay.release()
    liar.listener.close()
    assert same(root, nodes.folders[0] / "dest") and result.bytes_sent == source.manifest.size
    assert "damaged" in result.notes[0]


def _strangers(
    terms: dict[str, str], other: dict[str, str]
) -> Iterator[Callable[[socket.socket], peer.Wire]]:
    """Those who know nothing of a transfer: no TLS at all, no certificate, a certificate of another one."""
    yield lambda one: agent_relay.opened(one, {"mode": "plain", "secret": "00"}, accepts=False)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    mine = agent_relay.prepared(terms, "/nowhere") if terms["mode"] == "tls" else {}
    if mine:
        yield lambda one: agent_relay.opened(one, {**mine, "context": lambda accepts: bare}, accepts=False)
        wrong = agent_relay.prepared(other, "/nowhere")["context"](False)
        wrong.verify_mode = ssl.CERT_NONE
        yield lambda one: agent_relay.opened(one, {**mine, "context": lambda accepts: wrong}, accepts=False)


@pytest.mark.parametrize("plain", [False, True])
def test_a_stranger_gets_nothing(made: Callable[[int], Nodes], root: Path, plain: bool) -> None:
    nodes = made(1)
    source = SlowSource(root, 3.0)
    relay = Relay(nodes.nodes, plain)
    pushing = threading.Thread(target=nodes.push, args=(source, relay))
    pushing.start()
    wait_for(lambda: relay.members)
    ((_, port),) = relay.members
    refused = 0
    for greet in _strangers(relay.terms("node0", SIZE), Relay(nodes.nodes).terms("node0", SIZE)):
        with (
            socket.create_connection(("127.0.0.1", port)) as connection,
            pytest.raises((OSError, ValueError), match=r"ended|alert|reset|pipe|unavailable|timed out"),
        ):
            stream = greet(connection)
            stream.send(LENGTH.pack(7) + b"[[0,1]]")
            stream.read(LENGTH.size)
        refused += 1
    assert refused == (1 if plain else 3)
    # And one of the transfer does.
    with socket.create_connection(("127.0.0.1", port)) as connection:
        ours = agent_relay.prepared(relay.terms("node0", SIZE), "/nowhere")
        stream = agent_relay.opened(connection, ours, accepts=False)
        stream.send(LENGTH.pack(7) + b"[[0,1]]")
        while not (size := LENGTH.unpack(stream.read(LENGTH.size))[0]):
            pass
        assert stream.read(size - 1) == (root / source.manifest.files[0].path).read_bytes()[: tree.PIECE]
    pushing.join()
    relay.release()
