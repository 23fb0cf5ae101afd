"""The connections of a process, and those whose other end acknowledges nothing."""

from __future__ import annotations

import ctypes
import os
import socket
import time

import pytest

from bench.runs.hang_ways import ATTACH_FILTER, DROP
from clusterctl.agent.ranks.links import links_of


def connected(family: socket.AddressFamily, address: str) -> tuple[socket.socket, socket.socket]:
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        first = socket.create_connection(listener.getsockname()[:2])
        return first, listener.accept()[0]


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["ipv4", "ipv6"]
)
def test_an_end_that_drops_all_packets_is_unheard(family: socket.AddressFamily, address: str) -> None:
    try:
        first, second = connected(family, address)
    except OSError:
        pytest.skip("no such addresses here")
    others = connected(socket.AF_INET, "127.0.0.1")
    code = ctypes.create_string_buffer(DROP)
    words = b"\x01".ljust(8, b"\0") + bytes(ctypes.c_void_p(ctypes.addressof(code)))
    try:
        second.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, words)
    except PermissionError:
        pytest.skip("this kernel has no memory left for the filters of ordinary users")
    ports = [end.getsockname()[1] for end in (first, second, *others)]
    for end in (first, *others):
        end.send(b"x")
    deadline = time.monotonic() + 60
    while not (found := links_of(os.getpid()))["unheard"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [int(end.rpartition(":")[2], 16) for end in found["unheard"]] == [ports[1]]
    assert {int(end.rpartition(":")[2], 16) for end in found["ends"]} >= set(ports)
    for end in (first, second, *others):
        end.close()


def test_a_process_that_has_ended_has_no_links() -> None:
    assert links_of(0) == {"ends": [], "unheard": []}
