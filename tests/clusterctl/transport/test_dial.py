"""Connections that last as long as a run: they leave HCCL's ports to the ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from clusterctl.checks.query import HCCL_BASE, HCCL_PORTS
from clusterctl.ssh.config import Route
from clusterctl.ssh.proxy import connected
from clusterctl.transport import dial


class Refused:
    """A range that holds the first ports that it is asked about, as if the kernel had chosen those of HCCL."""

    def __init__(self, count: int) -> None:
        self.count, self.ports = count, list[int]()

    def __contains__(self, port: int) -> bool:
        if len(self.ports) == self.count:
            return port in self.ports
        self.ports.append(port)
        return True

    def __len__(self) -> int:
        return 16


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refused:
    ports = Refused(3)
    monkeypatch.setattr(dial, "HCCL", ports)
    return ports


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


def test_the_range_is_that_of_the_checks() -> None:
    assert [*dial.HCCL] == list(range(60000, 60016)) == list(range(HCCL_BASE, HCCL_BASE + HCCL_PORTS))


def test_an_agent_in_an_allocation_connects_from_another_port(
    refused: Refused, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, names = b"s" * 32, list[str]()
    host, port = server.getsockname()

    def welcome() -> None:
        with server.accept()[0] as caller:
            names.append(dial.welcome(caller, secret))

    launcher = threading.Thread(target=welcome, daemon=True)
    launcher.start()
    with dial.reach(secret, [host], port, "node1") as connection:
        launcher.join(30)
        own = connection.getsockname()[1]
    assert names == ["node1"]
    assert len(set(refused.ports)) == 3 and own not in refused.ports
    # Nobody has seen the ports that were passed over.
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
        server.accept()


def test_a_login_connects_from_another_port(refused: Refused, server: socket.socket) -> None:
    """The launching machine may be a node of the run."""
    host, port = server.getsockname()
    with connected(Route(host=host, port=port), 10.0, {}) as connection:
        assert connection.getsockname()[1] not in refused.ports and len(refused.ports) == 3


def test_where_every_port_is_refused_there_is_a_connection_all_the_same(
    monkeypatch: pytest.MonkeyPatch, server: socket.socket
) -> None:
    monkeypatch.setattr(dial, "HCCL", Refused(1000))
    with dial.connected(*server.getsockname()) as connection:
        assert connection.getpeername() == server.getsockname()
