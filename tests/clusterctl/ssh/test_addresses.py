"""A name server that fails: nodes that were reached before stay reachable, and no run is ended for it."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from clusterctl.errors import NoAddress, Unreachable
from clusterctl.inventory.cluster import Node
from clusterctl.runs import controller
from clusterctl.runs.causes.cause import find_cause
from clusterctl.runs.controller import Control
from clusterctl.runs.state import RunState, read_state
from clusterctl.ssh.config import Route
from clusterctl.ssh.gateways import dial
from clusterctl.ssh.proxy import Place
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, Stream
from clusterctl.transport.local import LocalTransport
from tests.clusterctl.runs.test_run import launched, program, wait_for


def silent(*_: object) -> list[object]:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_the_last_address_that_worked_is_used_without_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    route, worked = Route("localhost", server.getsockname()[1], family="inet"), dict[tuple[str, int], Place]()
    dial("node1", route, 5.0, worked).close()
    monkeypatch.setattr(socket, "getaddrinfo", silent)
    dial("node1", route, 5.0, worked).close()
    with pytest.raises(NoAddress, match=r"no address for 'localhost' .Temporary failure"):
        dial("node1", route, 5.0, {})
    # It was reached before: the fault is not the name server's.
    server.close()
    with pytest.raises(Unreachable, match="nothing listens at localhost"):
        dial("node1", route, 5.0, worked)


class Nameless:
    """Nodes of which one cannot be looked up while `fails`."""

    def __init__(self) -> None:
        self.local, self.fails = LocalTransport(), False

    def connect(self, node: Node) -> Connection:
        if self.fails and node.name == "node2":
            raise NoAddress(node.name, "no address for 'node2' (Temporary failure in name resolution)")
        return self.local.connect(node)

    def start(self, node: Node, command: str) -> Stream:
        return self.local.start(node, command)


UNTIL = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists({path!r}): time.sleep(0.1)"


@pytest.mark.parametrize("back", [True, False])
def test_a_failed_look_up_ends_no_run_and_is_quoted_when_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    monkeypatch.setattr(controller, "PATIENCE", 4.0)
    monkeypatch.setattr("clusterctl.runs.decide.attempt.ALONE", 600.0 if back else 10.0)
    transport = Nameless()
    with Connections(transport) as connections:
        run = launched(tmp_path, connections, program(UNTIL.format(path=str(tmp_path / "end")), grace=0.5))
        ends: list[RunState | None] = []

        def control() -> None:
            for _ in Control(run, connections, lines=False):
                pass
            ends.append(read_state(run))

        thread = threading.Thread(target=control, daemon=True)
        thread.start()
        wait_for(lambda: run.log("node2", 3, "out").exists() and run.log("node2", 3, "out").read_text())
        transport.fails = True
        connections.drop(run.read_record().cluster.node("node2"))
        if back:
            time.sleep(9.0)
            assert not ends
            transport.fails = False
            (tmp_path / "end").touch()
        thread.join(60)
        state = ends[0]
        assert state is not None
        assert state.phase == ("finished" if back else "lost")
        if not back:
            title = find_cause(run, state).title
            assert title == (
                "lost node2: this machine has no address for 'node2' (Temporary failure in name resolution)"
            )
            transport.fails = False
            from clusterctl.runs.stop import stop_run

            stop_run(run, connections, grace=0.0)
