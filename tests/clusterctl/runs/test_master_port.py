"""The port on which rank 0 listens."""

from __future__ import annotations

import socket
import sys

from clusterctl.inventory.cluster import Node
from clusterctl.runs.prepare.master_port import ASK, free_port
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport

NODE = Node("node1", "local", "127.0.0.1", python=sys.executable)


def test_it_is_free_and_none_that_the_kernel_gives_to_outgoing_connections() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    with Connections(LocalTransport()) as connections:
        ports = [free_port(connections.of(NODE), NODE) for _ in range(5)]
    assert len(set(ports)) > 1, "two launches at once do not choose the same"
    for port in ports:
        assert 20000 <= port < min(first, 30000) or first <= 21000
        with socket.socket() as door:
            door.bind(("", port))


def test_a_machine_without_such_ports_gives_any_free_one() -> None:
    taken = ASK.replace("is_free(port)), 0)", "False), 0)")
    assert taken != ASK
    with Connections(LocalTransport()) as connections:
        said = connections.of(NODE).run([sys.executable, "-c", taken])
    assert 1024 < int(said.stdout) < 65536
