"""Ports of this machine for programs that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections.

    One of those may be taken by another test before the program listens.
    """
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
