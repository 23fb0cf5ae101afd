"""Connections between the launcher and nodes: delays, cuts of either direction, and ends that are noticed late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from clusterctl.agent.frames import ALL_BEAT, SILENCE
from tests.simulation.clock import Clock, Expected, Killed, Machine, Process, Result, Task

# Seconds after which a request for a connection is sent again, until it is given up.
RETRANSMITS = (1.0, 2.0, 4.0, 3.0)


class NoLink(Expected):
    """A connection broke, or could not be opened."""


@dataclass(eq=False)
class Path:
    """The way to a node and back."""

    there: bool = True
    back: bool = True
    since: float = 0.0
    """When it was cut."""
    resolves: bool = True
    """Whether the launcher can look up the node's address."""

    @property
    def is_open(self) -> bool:
        return self.there and self.back


@dataclass(eq=False)
class Link:
    """A connection of a process of the launcher to the agent of a node."""

    node: str
    boot: int
    is_open: bool = True
    calls: dict[Result, None] = field(default_factory=dict)
    tasks: dict[Process, None] = field(default_factory=dict)
    held: list[Callable[[], None]] = field(default_factory=list)
    """What is under way on a path that is cut."""


class Network:
    """All paths and connections."""

    def __init__(self, clock: Clock, random: Random, machines: dict[str, Machine]) -> None:
        self.clock, self.random, self.machines = clock, random, machines
        self.paths = {name: Path() for name in machines}
        self.links: dict[str, dict[Link, None]] = {name: {} for name in machines}

    def delay(self) -> float:
        return 0.0005 * (1 + 9 * self.random.random() ** 4)

    def connect(self, node: str) -> Task:
        """Return a new connection, or raise NoLink."""
        machine = self.machines[node]
        if not self.paths[node].resolves:
            yield 0.1
            raise NoLink("no address")
        yield 3 * self.delay()
        for pause in RETRANSMITS:
            if not self.is_silent(node):
                break
            yield pause
        else:
            raise NoLink("no answer")
        link = Link(node, machine.boot)
        self.links[node][link] = None
        return link

    def call(self, link: Link, work: Callable[[], Task]) -> Result:
        """Let the agent do some work; the result is its answer, or NoLink."""
        result = Result()
        if not link.is_open:
            result.set(error=NoLink("closed"))
            return result
        link.calls[result] = None

        def arrive() -> None:
            machine = self.machines[link.node]
            if link.is_open and machine.is_up and machine.boot == link.boot:
                process = Process(self.clock, machine, work())
                link.tasks[process] = None
                process.done.waiting.append(lambda: done(process))

        def done(process: Process) -> None:
            # A machine without power sends nothing.
            if not isinstance(process.done.error, Killed):
                self._send(link, lambda: answer(process), back=True)

        def answer(process: Process) -> None:
            link.tasks.pop(process, None)
            link.calls.pop(result, None)
            result.set(process.done.value, process.done.error)

        self._send(link, arrive)
        return result

    def report(self, link: Link, work: Callable[[], None]) -> None:
        """Let something that the agent sends arrive at the launcher."""
        self._send(link, work, back=True)

    def _send(self, link: Link, work: Callable[[], None], *, back: bool = False) -> None:
        def arrive() -> None:
            if not link.is_open:
                return
            path = self.paths[link.node]
            if not (path.back if back else path.there):
                link.held.append(lambda: self._send(link, work, back=back))
            else:
                work()

        self.clock.at(self.delay(), arrive)

    def close(self, link: Link, reason: str = "closed") -> None:
        """End a connection: calls fail, and the agent gives up what it does."""
        if not link.is_open:
            return
        link.is_open = False
        self.links[link.node].pop(link, None)
        for process in list(link.tasks):
            process.kill()
        calls, link.calls = link.calls, {}
        for result in calls:
            result.set(error=NoLink(reason))

    def reset(self, node: str, reason: str) -> None:
        for link in list(self.links[node]):
            self.close(link, reason)

    def cut(self, node: str, *, there: bool, back: bool) -> None:
        """Cut a path; its connections are given up after SILENCE."""
        path = self.paths[node]
        path.there, path.back, path.since = path.there and not there, path.back and not back, self.clock.now
        self.give_up_later(node)

    def give_up_later(self, node: str) -> None:
        """Give up connections to a node that stays silent."""
        links = list(self.links[node])

        def look() -> None:
            if self.is_silent(node):
                for link in links:
                    self.close(link, "silent")

        self.clock.at(SILENCE, look)

    def heal(self, node: str) -> None:
        path = self.paths[node]
        path.there = path.back = path.resolves = True
        for link in list(self.links[node]):
            held, link.held = link.held, []
            for work in held:
                work()

    def is_silent(self, node: str) -> bool:
        machine = self.machines[node]
        return not self.paths[node].is_open or not machine.is_up or machine.paused_until > self.clock.now

    def silent_for(self, node: str) -> float:
        """Return the seconds since the last byte of a node that has a connection."""
        return self.clock.now - self.paths[node].since if self.is_silent(node) else ALL_BEAT / 2
