"""Repeat handshakes that a busy server dropped, after random pauses that grow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from clusterctl.errors import Unreachable

T = TypeVar("T")
# A default sshd drops a part of 64 handshakes at once; each wave of retries is smaller.
TRIES = 6
# Seconds before the second try, doubled each time, times 0.5 to 1.5.
FIRST_PAUSE = 0.3
# A handshake that fails after this many seconds is not repeated: such a server does not answer, it is not busy.
RETRY_LIMIT = 15.0
# Seconds for banner and key exchange: a node under load may take a few.
HANDSHAKE_LIMIT = 20.0


# Why a handshake ends, as far as that is known.
BUSY = "its sshd may be overloaded (MaxStartups), or another program answers at this port"
STALLED = (
    "the path to it may lose large packets (compare `ping -M do -s 1400` with `-s 400`), or the node hangs"
)


class Dropped(Exception):
    """The handshake ended before a login was tried; another try may succeed."""

    def __init__(self, node: str, problem: str, hint: str = BUSY) -> None:
        super().__init__(node, problem)
        self.node = node
        self.problem = problem
        self.hint = hint


def retried(connect: Callable[[], T]) -> T:
    """Call `connect` again while its handshakes are dropped; no other failure is repeated."""
    began = time.monotonic()
    attempt = 0
    while True:
        attempt += 1
        try:
            return connect()
        except Dropped as dropped:
            if attempt == TRIES or time.monotonic() - began > RETRY_LIMIT:
                times = f" {attempt} times" if attempt > 1 else ""
                problem = f"the handshake failed{times}: {dropped.problem}"
                raise Unreachable(dropped.node, problem, dropped.hint) from None
            time.sleep(FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
