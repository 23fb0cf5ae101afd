"""The links that a keeper holds: one connection and one agent a node, for every command that asks."""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from clusterctl.agent.frames import BEAT, Inbox
from clusterctl.errors import ClusterctlError
from clusterctl.inventory.cluster import Node
from clusterctl.transport.link import Asked, Link

# An agent says a word every BEAT seconds: a link that was silent for longer is asked first.
PROOF = 3 * BEAT
# Seconds for that answer, before a new connection is made.
PROOF_LIMIT = 3.0
# Seconds of sleep that no link notices.
NAP = 1.0


@dataclass
class Kept:
    """One node's link, made by whoever needs it first."""

    node: Node
    key: str
    link: Link | None = None
    used: float = field(default_factory=time.monotonic)
    making: threading.Lock = field(default_factory=threading.Lock)
    proved: float = 0.0
    """How long the machine had slept when the link was last known to be good."""

    def is_fresh(self) -> bool:
        """Whether the node was heard so lately that it needs no question first; not after the machine slept."""
        if self.link is None or self.link.is_closed:
            return False
        return self.link.silent_for() < PROOF and _slept() - self.proved < NAP

    def is_there(self) -> bool:
        """Whether the link is of use; one in doubt is asked."""
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

    class Echo(Asked):
        def __init__(self, number: int) -> None:
            super().__init__(link, number, "hello")
            self.inbox = _Told(answered)

    try:
        link.ask("hello", b"{}", Echo)
    except ClusterctlError:
        return False
    return answered.wait(PROOF_LIMIT) and not link.is_closed


class _Told(Inbox):
    """Only whether anything came."""

    def __init__(self, heard: threading.Event) -> None:
        super().__init__(lambda count: None)
        self._heard = heard

    def close(self, problem: BaseException | None = None) -> None:
        self._heard.set()


class Guest(Protocol):
    """One command that uses links."""

    held: set[str]
    """The links that must not be closed while it runs."""
    used: set[str]
    is_command: bool
    """Not `keeper status`: to look is no use."""

    def close(self) -> None: ...


class Holder:
    """All links of one user, and the commands that use them now."""

    def __init__(self, idle: float) -> None:
        self.idle = idle
        self.began = time.time()
        self._used = time.monotonic()
        self._kept: dict[str, Kept] = {}
        self._guests: set[Guest] = set()
        self._change = threading.Lock()
        self._over = False

    def stop(self, *_: object) -> None:
        self._over = True

    def is_over(self) -> bool:
        """Whether it was stopped, or nobody came for too long."""
        with self._change:
            busy = any(guest.is_command for guest in self._guests)
        return self._over or (not busy and time.monotonic() - self._used > self.idle)

    def enter(self, guest: Guest) -> None:
        with self._change:
            self._guests.add(guest)

    def leave(self, guest: Guest) -> None:
        with self._change:
            self._guests.discard(guest)
            if guest.is_command:
                self._used = time.monotonic()
            for key in guest.used:
                self._kept[key].used = self._used

    def look(self) -> None:
        """Close the links that nobody holds or used for long enough."""
        now = time.monotonic()
        with self._change:
            held = {key for guest in self._guests for key in guest.held}
            idle = [one for one in self._kept.values() if one.key not in held and now - one.used > self.idle]
            for one in idle:
                self._kept.pop(one.key)
        for one in idle:
            threading.Thread(target=one.drop, daemon=True).start()

    def of(self, key: str, node: Node, guest: Guest) -> Kept:
        """A node's place among the links, which stays while this command runs."""
        with self._change:
            guest.held.add(key)
            guest.used.add(key)
            return self._kept.setdefault(key, Kept(node, key))

    def find(self, key: str) -> Kept | None:
        return self._kept.get(key)

    def fresh(self, guest: Guest) -> list[str]:
        """The keys of the links that can be used at once, and that stay while this command runs."""
        with self._change:
            found = [key for key, kept in self._kept.items() if kept.is_fresh()]
            guest.held.update(found)
            return found

    def status(self) -> dict[str, Any]:
        """What `keeper status` shows."""
        now = time.monotonic()
        with self._change:
            links = [
                {"node": kept.node.name, "host": kept.node.host, "idle": round(now - kept.used, 1)}
                for kept in self._kept.values()
                if kept.link is not None and not kept.link.is_closed
            ]
            commands = sum(guest.is_command for guest in self._guests)
        return {
            "began": self.began,
            "persist": self.idle,
            "commands": commands,
            "memory_mb": _memory() >> 20,
            "links": links,
        }

    def close(self) -> None:
        """End all links, so that their agents end; at most some seconds for all together."""
        with self._change:
            kept, guests = list(self._kept.values()), list(self._guests)
        closers = [threading.Thread(target=one.drop, daemon=True) for one in kept]
        for thread in closers:
            thread.start()
        deadline = time.monotonic() + 10.0
        for thread in closers:
            thread.join(max(0.0, deadline - time.monotonic()))
        for guest in guests:
            guest.close()


def _memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _slept() -> float:
    """How long this machine slept since it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
