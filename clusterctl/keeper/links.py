"""Keep the links of all commands of a user: one connection and one agent per node."""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from clusterctl.agent.frames import ALL_BEAT, Inbox
from clusterctl.errors import ClusterctlError
from clusterctl.inventory.cluster import Node
from clusterctl.keeper.messages import KeeperStatus, KeptLink
from clusterctl.transport.link import Link, PendingRequest

# An agent answers a heartbeat every ALL_BEAT seconds: a link silent for two of them is tested before use.
PROOF = 2 * ALL_BEAT + 1
# Seconds to wait for the test's answer before a new connection is made.
PROOF_LIMIT = 3.0
# Seconds of machine sleep after which a link is tested before use.
NAP = 1.0


@dataclass
class LinkEntry:
    """The link of one node; the first command that needs it opens it."""

    node: Node
    key: str
    link: Link | None = None
    used: float = field(default_factory=time.monotonic)
    making: threading.Lock = field(default_factory=threading.Lock)
    proved: float = 0.0
    """The total time that the machine had been suspended since boot when the link last worked, in seconds."""

    def is_fresh(self) -> bool:
        """Return whether the node sent data recently and the machine has not slept since: no test is
        needed."""
        if self.link is None or self.link.is_closed:
            return False
        return self.link.silent_for() < PROOF and _slept() - self.proved < NAP

    def is_there(self) -> bool:
        """Return whether the link works; test it if it may be broken."""
        if self.is_fresh():
            return True
        if self.link is None or self.link.is_closed or not _answers(self.link):
            return False
        self.proved = _slept()
        return True

    def take(self, link: Link) -> None:
        self.link, self.proved, self.used = link, _slept(), time.monotonic()

    def drop(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()


def _answers(link: Link) -> bool:
    answered = threading.Event()

    class Echo(PendingRequest):
        def __init__(self, number: int) -> None:
            super().__init__(link, number, "hello")
            self.inbox = _Arrival(answered)

    try:
        link.ask("hello", b"{}", Echo)
    except ClusterctlError:
        return False
    return answered.wait(PROOF_LIMIT) and not link.is_closed


class _Arrival(Inbox):
    """An inbox that only records that a reply has arrived."""

    def __init__(self, activity: threading.Event) -> None:
        super().__init__(lambda count: None)
        self._activity = activity

    def close(self, problem: BaseException | None = None) -> None:
        self._activity.set()


class Client(Protocol):
    """The interface of a command that uses links."""

    held: set[str]
    """The keys of the links that must stay open while it runs."""
    used: set[str]
    is_command: bool
    """False for `keeper status`, which does not count as use."""

    def close(self) -> None: ...


class LinkHolder:
    """All links of one user, and the commands that use them."""

    def __init__(self, idle: float) -> None:
        self.idle = idle
        self.began = time.time()
        self._used = time.monotonic()
        self._kept: dict[str, LinkEntry] = {}
        self._clients: set[Client] = set()
        self._change = threading.Lock()
        self._over = False

    def stop(self, *_: object) -> None:
        self._over = True

    def is_over(self) -> bool:
        """Return whether the keeper was stopped, or no command has used it for too long."""
        with self._change:
            busy = any(client.is_command for client in self._clients)
        return self._over or (not busy and time.monotonic() - self._used > self.idle)

    def enter(self, client: Client) -> None:
        with self._change:
            self._clients.add(client)

    def leave(self, client: Client) -> None:
        with self._change:
            self._clients.discard(client)
            if client.is_command:
                self._used = time.monotonic()
            for key in client.used:
                self._kept[key].used = self._used

    def close_idle(self) -> None:
        """Close the links that no running command uses and that have been idle for long enough."""
        now = time.monotonic()
        with self._change:
            held = {key for client in self._clients for key in client.held}
            idle = [
                link for link in self._kept.values() if link.key not in held and now - link.used > self.idle
            ]
            for link in idle:
                self._kept.pop(link.key)
        for link in idle:
            threading.Thread(target=link.drop, daemon=True).start()

    def of(self, key: str, node: Node, client: Client) -> LinkEntry:
        """Return the entry of a node; it is kept while this command runs."""
        with self._change:
            client.held.add(key)
            client.used.add(key)
            return self._kept.setdefault(key, LinkEntry(node, key))

    def find(self, key: str) -> LinkEntry | None:
        return self._kept.get(key)

    def fresh(self, client: Client) -> list[str]:
        """Return the keys of the links that need no test; they are kept while this command runs."""
        with self._change:
            found = [key for key, entry in self._kept.items() if entry.is_fresh()]
            client.held.update(found)
            return found

    def status(self) -> KeeperStatus:
        """Return what `keeper status` shows."""
        now = time.monotonic()
        with self._change:
            links = tuple(
                KeptLink(entry.node.name, entry.node.host, round(now - entry.used, 1))
                for entry in self._kept.values()
                if entry.link is not None and not entry.link.is_closed
            )
            commands = sum(client.is_command for client in self._clients)
        return KeeperStatus(self.began, self.idle, commands, _memory() >> 20, links)

    def close(self) -> None:
        """Close all links, which ends their agents; wait at most 10 seconds for all of them."""
        with self._change:
            entries, clients = list(self._kept.values()), list(self._clients)
        closers = [threading.Thread(target=link.drop, daemon=True) for link in entries]
        for thread in closers:
            thread.start()
        deadline = time.monotonic() + 10.0
        for thread in closers:
            thread.join(max(0.0, deadline - time.monotonic()))
        for client in clients:
            client.close()


def _memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _slept() -> float:
    """Return how many seconds this machine has slept since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
