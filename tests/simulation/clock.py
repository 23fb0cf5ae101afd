"""A virtual clock: processes that wait, in the order of their times; everything follows from a seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

# What a process may wait for: seconds, a result, or a result for at most so many seconds.
Waits = Any
Task = Generator[Waits, Any, Any]


class Expected(Exception):
    """An error that is the result of a process; any other is a bug of the simulation or of the decisions."""


class Killed(Expected):
    """The process, or its machine, is gone."""


class Result:
    """A value that is set later; processes may wait for it."""

    def __init__(self) -> None:
        self.is_set = False
        self.value: Any = None
        self.error: Exception | None = None
        self.waiting: list[Callable[[], None]] = []

    def set(self, value: Any = None, error: Exception | None = None) -> None:
        """Set the value once; later calls change nothing."""
        if self.is_set:
            return
        self.is_set, self.value, self.error = True, value, error
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            wake()


@dataclass
class Within:
    """Wait for a result for at most so many seconds; None if it is late."""

    result: Result
    seconds: float


@dataclass(eq=False)
class Machine:
    """A computer: its processes stand still while it is paused, and are gone when it loses its power."""

    name: str
    boot: int = 1
    is_up: bool = True
    paused_until: float = 0.0
    processes: dict[Process, None] = field(default_factory=dict)


class Process:
    """A generator that runs on a machine."""

    def __init__(self, clock: Clock, machine: Machine, task: Task, *, apart: bool = False) -> None:
        """`apart`: it outlives the process that starts it."""
        self.clock, self.machine, self.task = clock, machine, task
        self.children: dict[Process, None] = {}
        self.parent = None if apart else clock.running
        if self.parent:
            self.parent.children[self] = None
        self.done = Result()
        self.is_alive = True
        self.epoch = 0
        machine.processes[self] = None
        self._later(0.0, None, None)

    def _later(self, seconds: float, value: Any, error: Exception | None) -> None:
        epoch = self.epoch
        self.clock.at(seconds, lambda: self._go_on(epoch, value, error))

    def _go_on(self, epoch: int, value: Any, error: Exception | None) -> None:
        if not self.is_alive or epoch != self.epoch:
            return
        if self.machine.paused_until > self.clock.now:
            pause = self.machine.paused_until - self.clock.now
            self.clock.at(pause, lambda: self._go_on(epoch, value, error))
            return
        self.epoch += 1
        before, self.clock.running = self.clock.running, self
        try:
            wanted = self.task.throw(error) if error else self.task.send(value)
        except StopIteration as end:
            self._end(end.value, None)
            return
        except Expected as problem:
            self._end(None, problem)
            return
        finally:
            self.clock.running = before
        self._wait_for(wanted)

    def _wait_for(self, wanted: Waits) -> None:
        if isinstance(wanted, (int, float)):
            self._later(float(wanted), None, None)
            return
        result = wanted.result if isinstance(wanted, Within) else wanted
        if isinstance(wanted, Within):
            self._later(wanted.seconds, None, None)
        epoch = self.epoch

        def wake() -> None:
            self.clock.at(0.0, lambda: self._go_on(epoch, result.value, result.error))

        if result.is_set:
            wake()
        else:
            result.waiting.append(wake)

    def _end(self, value: Any, error: Exception | None) -> None:
        self.is_alive = False
        self.machine.processes.pop(self, None)
        if self.parent:
            self.parent.children.pop(self, None)
        self.done.set(value, error)

    def kill(self) -> None:
        """End the process, as SIGKILL does: it does nothing more."""
        if self.is_alive:
            for child in list(self.children):
                child.kill()
            self.task.close()
            self._end(None, Killed())


class Clock:
    """The time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.running: Process | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, seconds: float, work: Callable[[], None]) -> None:
        """Call `work` after so many seconds."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), work))

    def run(self, until: float) -> None:
        """Let everything happen up to a time, or until nothing is left to happen."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, work = heapq.heappop(self._heap)
            self.events += 1
            work()
        self.now = max(self.now, until) if not self._heap else until
