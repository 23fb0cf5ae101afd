"""The bytes' way to an SSH server, and how many take it at a time; nothing here needs paramiko."""

from __future__ import annotations

import socket
import threading

from clusterctl.errors import Unreachable
from clusterctl.ssh_config import Way
from clusterctl.ssh_proxy import connected

AT_ONCE = 8  # handshakes at a time with one server; a default sshd drops them at random from 10 on


class Doors:
    """How many handshakes are under way with each server: many nodes may stand behind one address."""

    def __init__(self) -> None:
        self._doors: dict[tuple[str, int, Way | None], threading.BoundedSemaphore] = {}
        self._change = threading.Lock()

    def of(self, way: Way) -> threading.BoundedSemaphore:
        with self._change:
            place = (way.host, way.port, way.gateway)
            return self._doors.setdefault(place, threading.BoundedSemaphore(AT_ONCE))


def dial(node: str, way: Way, limit: float) -> socket.socket:
    """The bytes' way to the server itself: TCP, or the user's own ProxyCommand."""
    try:
        return connected(way, limit)
    except (socket.gaierror, UnicodeError) as problem:
        what = f"no address for {way.host!r} ({getattr(problem, 'strerror', problem)})"
        raise Unreachable(node, what, "check `host`") from None
    except OSError as problem:
        raise _unreachable(node, way, problem, limit) from None


def _unreachable(node: str, way: Way, trouble: OSError, limit: float) -> Unreachable:
    if isinstance(trouble, ConnectionRefusedError):
        what = f"nothing listens at {way.host} port {way.port}"
        return Unreachable(node, what, "check `host` and `port`, and that sshd runs there")
    if isinstance(trouble, TimeoutError):
        what = f"{way.host} port {way.port} did not answer within {limit:g} s"
        return Unreachable(node, what, "check the address, the network and the firewall")
    return Unreachable(node, f"{way.host} port {way.port}: {trouble.strerror or trouble}")
