"""A node: its disk, the agent's operations, the supervisor of an attempt, and the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

from clusterctl.agent.records import FINAL
from tests.simulation.clock import Clock, Expected, Machine, Process, Result, Task, Within
from tests.simulation.network import Link, Network

# Seconds between two looks at processes that must end.
LOOK = 0.2
# Seconds that a supervisor has to start.
STARTING = 60.0
# Seconds of SIGKILL until processes that hang in the kernel are given up.
LIMIT = 5.0
# Seconds after which a rank without a step counts as hung.
HUNG = 30.0


class Refused(Expected):
    """The agent refuses a request."""


@dataclass(eq=False)
class Rank:
    """A process of a run."""

    attempt: int
    number: int
    ends_late: float
    """Seconds from SIGTERM to its end; infinite if it ignores the signal."""
    ended: Result
    lives: bool = True
    hangs_since: float | None = None


@dataclass(eq=False)
class Node(Machine):
    """A machine with the agent's operations; `code` has the decisions that it carries out."""

    clock: Clock = field(kw_only=True)
    random: Random = field(kw_only=True)
    network: Network = field(kw_only=True)
    code: ModuleType = field(kw_only=True)
    on_change: Callable[[Node, str, int], None] = field(kw_only=True)
    """Called with what happened to the ranks: `start`, `end` or `failure`, and the attempt."""
    disk: dict[tuple[int, str], Any] = field(default_factory=dict)
    is_full: bool = False
    unwritten: dict[tuple[int, str], Any] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)
    supervisors: dict[int, Supervisor] = field(default_factory=dict)
    followers: dict[int, list[tuple[Link, Callable[[str, Any], None]]]] = field(default_factory=dict)

    # -- the disk

    def read(self, attempt: int, name: str) -> Any:
        return self.disk.get((attempt, name))

    def write(self, attempt: int, name: str, value: Any) -> None:
        """Write a record; a new one on a full disk is written when there is space."""
        if not self.is_full or (attempt, name) in self.disk:
            self.disk[attempt, name] = value
        else:
            self.unwritten[attempt, name] = value

    def fill(self, *, full: bool) -> None:
        """Fill the disk, or free some space."""
        self.is_full = full
        if not full:
            # Whoever follows the attempts reads the records again.
            self.disk.update(self.unwritten)
            self.unwritten.clear()
            for supervisor in self.supervisors.values():
                supervisor.notify()

    # -- faults

    def lose_power(self) -> None:
        """Everything that runs is gone; the last records may be, too."""
        self.is_up = False
        for rank in self.living():
            self.end_rank(rank, 9)
        for process in list(self.processes):
            process.kill()
        self.supervisors.clear()
        self.followers.clear()
        self.unwritten.clear()

    def start_again(self) -> None:
        self.is_up, self.boot = True, self.boot + 1
        self.network.reset(self.name, "reset")

    def living(self, attempt: int | None = None) -> list[Rank]:
        return [rank for rank in self.ranks if rank.lives and attempt in (None, rank.attempt)]

    def end_rank(self, rank: Rank, code: int) -> None:
        if rank.lives:
            rank.lives = False
            self.ranks.remove(rank)
            self.on_change(self, "end", rank.attempt)
            rank.ended.set(code)

    # -- the agent's operations

    def start(self, attempt: int, numbers: list[int]) -> Task:
        """Start an attempt under a supervisor, as attempts.start does; return once its ranks have been started."""
        if self.read(attempt, "stop"):
            raise Refused("stopped")
        if self.read(attempt, "supervisor"):
            raise Refused("exists")
        yield 0.001
        if self.living():
            raise Refused("in use")
        if self.is_full:
            raise Refused("no space left")
        self.write(attempt, "spec", numbers)
        yield 0.005 * self.random.random()
        supervisor = Supervisor(self, attempt, numbers)
        self.supervisors[attempt] = supervisor
        process = Process(self.clock, self, supervisor.supervise())
        supervisor.process = process
        process.done.waiting.append(supervisor.gone)
        yield Within(supervisor.ready, STARTING)
        if not process.is_alive and self.read(attempt, "node") not in FINAL:
            raise Refused("the supervisor did not start")
        return attempt

    def stop(self, attempt: int, grace: float, hang: dict[str, Any] | None = None) -> Task:
        """Stop an attempt's ranks, as attempts.stop does; return how many are left."""
        state = self.code.Stopping(grace)
        while True:
            supervisor = self.supervisors.get(attempt)
            lives = supervisor is not None and supervisor.process.is_alive
            node = self.read(attempt, "node")
            silent = None if supervisor is None else self.clock.now - supervisor.beat
            letter = "T" if supervisor is not None and supervisor.is_stuck else "S"
            seen = self.code.Seen(self.read(attempt, "spec") is not None, lives, node, silent, letter)
            state, actions = self.code.stop(state, seen, self.clock.now)
            for action in actions:
                if action == "record":
                    self.write(attempt, "stop", {"grace": grace, "hang": hang})
                elif action == "sweep":
                    yield from self.end_all(attempt, lambda: grace)
                    self.write(attempt, "node", "stopped")
                elif supervisor is not None and action == "terminate":
                    supervisor.terminate()
                elif supervisor is not None and action == "kill":
                    supervisor.process.kill()
            if state.stage == "answered":
                return len(self.living(attempt))
            yield {"waiting": LOOK, "killed": 0.2}.get(state.stage, 0.001)

    def end_all(self, attempt: int, grace: Callable[[], float]) -> Task:
        """End the ranks of an attempt: with SIGTERM, and after the grace with SIGKILL."""
        began, killed = self.clock.now, float("inf")
        asked = set[Rank]()
        while (ranks := self.living(attempt)) and self.clock.now - killed < LIMIT:
            is_over = self.clock.now - began >= grace()
            killed = min(killed, self.clock.now) if is_over else killed
            for rank in ranks:
                if is_over:
                    self.clock.at(0.01, lambda rank=rank: self.end_rank(rank, 9))  # type: ignore[misc]
                elif rank not in asked:
                    asked.add(rank)
                    if rank.ends_late < float("inf"):
                        self.clock.at(rank.ends_late, lambda rank=rank: self.end_rank(rank, 15))  # type: ignore[misc]
            yield Within(next(iter(ranks)).ended, LOOK)

    def hello(self, attempt: int) -> Task:
        yield 0.001
        return self.boot

    def state(self, attempt: int) -> Task:
        """Return the phase of an attempt here: `lost` if its supervisor is dead, None if it never started."""
        yield 0.001
        return self.phase(attempt)

    def phase(self, attempt: int) -> str | None:
        node, supervisor = self.read(attempt, "node"), self.supervisors.get(attempt)
        if node in FINAL:
            return str(node)
        if self.read(attempt, "supervisor") is None:
            return None
        return "running" if supervisor is not None and supervisor.process.is_alive else "lost"

    def follow(self, attempt: int, link: Link, report: Callable[[str, Any], None]) -> Task:
        """Report a failure and a supervisor that does not respond; return the phase in which the attempt ended."""
        self.followers.setdefault(attempt, []).append((link, report))
        if failure := self.read(attempt, "failure"):
            self.tell(link, report, "failure", failure)
        while (phase := self.phase(attempt)) in ("running", None):
            supervisor = self.supervisors.get(attempt)
            if supervisor is None:
                yield STARTING
                if attempt not in self.supervisors:
                    return "lost"
                continue
            if supervisor.is_stuck and self.clock.now - supervisor.beat > 10.0:
                self.tell(link, report, "stuck", self.clock.now - supervisor.beat)
            yield Within(supervisor.changed, 2.0 if supervisor.is_stuck else 3600.0)
        return phase

    def tell(self, link: Link, report: Callable[[str, Any], None], word: str, value: Any) -> None:
        self.network.report(link, lambda: report(word, value))


class Supervisor:
    """Carries out what the supervisor's decisions say."""

    def __init__(self, node: Node, attempt: int, numbers: list[int]) -> None:
        self.node, self.attempt = node, attempt
        self.process: Process
        self.state = node.code.Supervised(dict.fromkeys(numbers, "waiting"), 3.0)
        self.ready, self.changed, self.woken = Result(), Result(), Result()
        self.terminated = False
        self.is_stuck = False
        self.stuck_at = 0.0
        self.ranks: dict[int, Rank] = {}
        self.events: list[Any] = []

    @property
    def beat(self) -> float:
        """When it sent its last heartbeat."""
        return self.stuck_at if self.is_stuck else self.node.clock.now

    def gone(self) -> None:
        """Its process has ended."""
        self.ready.set()
        self.notify()

    def terminate(self) -> None:
        self.terminated = True
        self._wake()

    def freeze(self, *, stuck: bool) -> None:
        """Let it hang in a system call, or go on."""
        self.is_stuck, self.stuck_at = stuck, self.node.clock.now
        self.notify()
        self._wake()

    def hang(self, number: int) -> None:
        """A rank takes no more steps; its heartbeats show it later."""
        self.node.clock.at(HUNG, lambda: self._find(number))

    def _find(self, number: int) -> None:
        if self.process.is_alive and self.ranks[number].lives:
            failure = {"rank": number, "hang": HUNG}
            self.events.append(self.node.code.Event("found", failure=failure))
            self._wake()

    def _wake(self) -> None:
        woken, self.woken = self.woken, Result()
        woken.set()

    def notify(self) -> None:
        """Wake those who follow the attempt."""
        changed, self.changed = self.changed, Result()
        changed.set()

    def supervise(self) -> Task:
        node, code = self.node, self.node.code
        node.write(self.attempt, "supervisor", node.boot)
        node.write(self.attempt, "node", "running")
        self.events.append(code.Event("began"))
        while self.state.stage != "over":
            while self.is_stuck:
                yield self.woken
            if not self.events:
                held = self.state.failure is not None and self.state.stage == "running"
                if not self.ready.is_set:
                    self.ready.set()
                yield Within(self.woken, 1.0) if held else self.woken
                self.events.append(code.Event("looked"))
            yield from self._step(self.events.pop(0))
        self.ready.set()
        self.notify()

    def _step(self, event: Any) -> Task:
        code = self.node.code
        due = [event]
        request = self.node.read(self.attempt, "stop")
        if self.state.stage == "running" and (self.terminated or request):
            request = request or {}
            stop = code.Event("stop", grace=request.get("grace", 3.0))
            found = [code.Event("found", failure=request["hang"])] if request.get("hang") else []
            due = [*found, stop, event]
        for each in due:
            self.state, actions = code.step(self.state, each, self.node.clock.now)
            for action in actions:
                yield from self._carry_out(action)

    def _carry_out(self, action: Any) -> Task:
        if action.kind == "spawn":
            yield 0.001
            self._spawn(action.rank)
        elif action.kind == "save":
            self.node.write(self.attempt, "failure", dict(self.state.failure))
            for link, report in self.node.followers.get(self.attempt, ()):
                self.node.tell(link, report, "failure", dict(self.state.failure))
        elif action.kind == "end":
            self.ready.set()
            yield from self.node.end_all(self.attempt, lambda: min(action.grace, self._asked_grace()))
            self.events.append(self.node.code.Event("ended"))
        elif action.kind == "finish":
            self.node.write(self.attempt, "node", self.state.outcome)
            yield 0.005

    def _asked_grace(self) -> float:
        return float((self.node.read(self.attempt, "stop") or {}).get("grace", "inf"))

    def _spawn(self, number: int) -> None:
        late = float("inf") if self.node.random.random() < 0.1 else 0.01 + 2 * self.node.random.random() ** 4
        rank = Rank(self.attempt, number, late, Result())
        self.node.ranks.append(rank)
        self.ranks[number] = rank
        self.node.on_change(self.node, "start", self.attempt)
        rank.ended.waiting.append(lambda: self._ended(rank))
        self.events.append(self.node.code.Event("started", number))
        self._wake()

    def _ended(self, rank: Rank) -> None:
        code = rank.ended.value
        failure = {"rank": rank.number, "exit_code": code} if code else {}
        self.events.append(self.node.code.Event("exited", rank.number, failure))
        self._wake()
