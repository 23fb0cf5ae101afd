"""The launcher's machine: the run's folder, a controller, the command `stop`, and who ends what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from clusterctl.inventory.cluster import Node as Place
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.restarts import Failure, History, Restart
from tests.simulation.clock import Clock, Machine, Process, Result, Task, Within
from tests.simulation.network import Link, Network, NoLink
from tests.simulation.node import Node, Refused

# Seconds between two requests to nodes that the run gave up.
CHASE = 5.0
GRACE = 3.0


@dataclass
class Folder:
    """The run's folder on the launcher's disk."""

    nodes: tuple[Place, ...]
    spares: tuple[Place, ...]
    ranks: dict[str, list[int]]
    policy: Restart
    full: int
    attempt: int = 1
    abandoned: dict[str, int] = field(default_factory=dict)
    """By node that was given up: the attempt that may still run there."""
    stop_asked: float | None = None
    phase: str = "running"
    """`running`, or the phase in which the run ended."""
    verdict: str = ""
    history: History = field(default_factory=History)
    step: int = 0
    blamed: list[tuple[int, str, int]] = field(default_factory=list)
    """The first failure of each attempt: the attempt, its node, its rank."""
    clearer: Process | None = None

    @property
    def is_over(self) -> bool:
        return self.phase != "running"

    def members(self) -> set[str]:
        return {node.name for node in self.nodes}


class Launcher(Machine):
    """Starts processes that use the run's folder."""

    def __init__(
        self, clock: Clock, network: Network, nodes: dict[str, Node], folder: Folder, code: ModuleType
    ) -> None:
        super().__init__("launcher")
        self.clock, self.network, self.nodes, self.folder, self.code = clock, network, nodes, folder, code
        self.controller: Process | None = None
        self.asked = Result()
        self.say: Callable[[str], None] = lambda text: None

    # -- connections

    def ask(self, links: dict[str, Link], name: str, work: Callable[[Node], Task]) -> Task:
        """Return a node's answer over the process's own connection; raise NoLink or Refused."""
        link = links.get(name)
        if link is None or not link.is_open:
            link = links[name] = yield from self.network.connect(name)
        node = self.nodes[name]
        return (yield self.network.call(link, lambda: work(node)))

    def ask_all(self, links: dict[str, Link], names: Sequence[str], work: Callable[[Node], Task]) -> Task:
        """Return the answers by name; a node that does not answer is missing, a refusal is an error."""
        tasks = {name: Process(self.clock, self, self._answer(links, name, work)) for name in names}
        answers: dict[str, Any] = {}
        for name, task in tasks.items():
            answer = yield task.done
            if answer is not None:
                answers[name] = answer[0]
        return answers

    def _answer(self, links: dict[str, Link], name: str, work: Callable[[Node], Task]) -> Task:
        try:
            return ((yield from self.ask(links, name, work)),)
        except NoLink:
            link = links.pop(name, None)
            if link is not None:
                self.network.close(link)
            return None
        except Refused as refused:
            return (refused,)

    # -- starting

    def launch(self) -> None:
        """Start the first attempt and control the run."""
        self.controller = Process(self.clock, self, Controller(self, started=False).launch())

    def take_over(self) -> None:
        """Put a controller in charge if the run has none."""
        if not (self.controller and self.controller.is_alive):
            self.controller = Process(self.clock, self, Controller(self, started=False).serve(), apart=True)

    def resume(self) -> None:
        """Start an ended run again, as its user does."""
        if self.folder.is_over and not self.has_controller():
            self.controller = Process(self.clock, self, Controller(self, started=False).resume(), apart=True)

    def clear_lost(self, links: dict[str, Link]) -> Task:
        """End what is left on nodes of an ended run, once they answer."""
        folder = self.folder
        if folder.clearer is not None and folder.clearer.is_alive:
            return
        while folder.abandoned and folder.is_over:
            yield from self.clear(links)
            yield CHASE

    def clear(self, links: dict[str, Link]) -> Task:
        """Stop the run on all abandoned nodes; those that answer are no longer abandoned."""
        folder = self.folder
        wanted = dict(folder.abandoned)

        def work(node: Node) -> Task:
            return node.stop(wanted[node.name], 0.0)

        answers = yield from self.ask_all(links, list(wanted), work)
        for name, left in answers.items():
            if left == 0 and folder.abandoned.get(name) == wanted[name]:
                del folder.abandoned[name]
                if name not in folder.members() and name not in {spare.name for spare in folder.spares}:
                    folder.spares = (*folder.spares, Place(name, name, ""))

    # -- the command `stop`

    def stop(self) -> Task:
        """Return the names of the nodes that `stop` did not reach; nothing is left where it reached all."""
        folder, links = self.folder, dict[str, Link]()
        process, result = self.code.stop_run(folder.is_over), None
        try:
            while True:
                step = process.send(result)
                if step == "record":
                    folder.stop_asked = self.clock.now
                    asked, self.asked = self.asked, Result()
                    asked.set()
                elif step == "attempt":
                    result = folder.attempt
                elif step == "send":
                    result = yield from self._send_stop(links)
                elif step == "await":
                    until = self.clock.now + 15.0
                    while self.has_controller() and not folder.is_over and self.clock.now < until:
                        yield 0.05
        except StopIteration as end:
            missed = list(end.value)
        yield from self.clear(links)
        if missed and not self.has_controller():
            if folder.is_over:
                folder.abandoned.update(dict.fromkeys(missed, folder.attempt))
            if folder.is_over:
                Process(self.clock, self, self.clear_lost({}), apart=True)
            else:
                self.take_over()
        elif not folder.is_over and not self.has_controller():
            self.take_over()
            while not folder.is_over and self.has_controller():
                yield 0.05
        return missed

    def _send_stop(self, links: dict[str, Link]) -> Task:
        """Stop the present attempt; return the names of the nodes that did not answer."""
        attempt, names = self.folder.attempt, [node.name for node in self.folder.nodes]
        answers = yield from self.ask_all(links, names, lambda node: node.stop(attempt, GRACE))
        return [name for name in names if name not in answers]

    def has_controller(self) -> bool:
        return self.controller is not None and self.controller.is_alive


class Controller:
    """Carries out what the controller's decisions say."""

    def __init__(self, launcher: Launcher, *, started: bool) -> None:
        self.launcher, self.started = launcher, started
        self.clock, self.network, self.folder = launcher.clock, launcher.network, launcher.folder
        self.code = launcher.code
        self.links: dict[str, Link] = {}

    def launch(self) -> Task:
        reason = yield from self._start(self.folder.nodes, self.folder.spares, first=True)
        if reason:
            self.folder.phase, self.folder.verdict = "failed", reason
            yield from self.launcher.clear_lost(self.links)
            return
        self.started = True
        yield from self.serve()

    def resume(self) -> Task:
        folder = self.folder
        phase, folder.phase = folder.phase, "running"
        folder.stop_asked, folder.history = None, History()
        yield from self.launcher.clear(self.links)
        members = self.code.Members(folder.nodes, folder.spares, folder.full)
        nodes, spares = yield from self._finish(self.code.choose(members, set(), folder.policy, bool))
        reason = yield from self._start(self.code.Start(tuple(nodes), tuple(spares)))
        if reason:
            folder.phase, folder.verdict = phase, reason
            yield from self.launcher.clear_lost(self.links)
            return
        self.started = True
        yield from self.serve()

    def _finish(self, process: Any) -> Task:
        """Carry out the steps of a process; return its result."""
        result = None
        try:
            while True:
                step = process.send(result)
                result = yield from getattr(self, f"_{type(step).__name__.lower()}")(step)
        except StopIteration as end:
            return end.value

    def serve(self) -> Task:
        folder = self.folder
        chase = Process(self.clock, self.launcher, self._chase())
        try:
            if not folder.is_over:
                self._conclude(
                    (yield from self._finish(self.code.control(folder.policy, folder.history, bool)))
                )
        finally:
            chase.kill()
        yield from self.launcher.clear_lost(self.links)

    def _chase(self) -> Task:
        while True:
            yield CHASE
            yield from self.launcher.clear({})

    def _conclude(self, end: Any) -> None:
        folder = self.folder
        folder.verdict = end.verdict
        phase = "finished" if end.attempt.failure is None else "failed"
        for name in sorted(end.attempt.left & folder.members()):
            folder.abandoned[name] = folder.attempt
        folder.phase = "stopped" if folder.stop_asked is not None and phase != "finished" else phase
        self.launcher.say(f"run {folder.phase}: {end.verdict}")

    # -- the steps of `control`

    def _announce(self, step: Any) -> Task:
        self.folder.history = step.decision.history
        self.launcher.say(step.decision.why)
        return ""
        yield

    def _wait(self, step: Any) -> Task:
        if self.folder.stop_asked is None:
            yield Within(self.launcher.asked, step.seconds)
        return self.folder.stop_asked is None

    def _readmembers(self, step: Any) -> Task:
        return self.code.Members(self.folder.nodes, self.folder.spares, self.folder.full)
        yield

    def _clear(self, step: Any) -> Task:
        attempt = self.folder.attempt
        answers = yield from self.launcher.ask_all(
            self.links, [node.name for node in step.nodes], lambda node: node.stop(attempt, 0.0)
        )
        return set(answers)

    def _checkspares(self, step: Any) -> Task:
        answers = yield from self.launcher.ask_all(
            self.links, [node.name for node in step.nodes], lambda node: node.hello(0)
        )
        return set(answers)

    def _start(self, nodes: Any, spares: Any = (), first: bool = False) -> Task:
        """Start an attempt on all nodes or on none; return why that failed, or ""."""
        folder = self.folder
        if not first:
            nodes, spares = nodes.nodes, nodes.spares
            answers = yield from self.launcher.ask_all(
                self.links, [node.name for node in nodes], lambda node: node.hello(0)
            )
            if len(answers) < len(nodes):
                return "a node does not answer"
            left = folder.members() - {node.name for node in nodes}
            folder.abandoned.update(dict.fromkeys(sorted(left), folder.attempt))
            folder.nodes, folder.spares = nodes, spares
            folder.attempt += 1
        attempt, names = folder.attempt, [node.name for node in folder.nodes]
        ranks = {name: [2 * index, 2 * index + 1] for index, name in enumerate(names)}
        folder.ranks = ranks
        self.launcher.say(f"starts attempt {attempt} on {' '.join(names)}")
        answers = yield from self.launcher.ask_all(
            self.links, names, lambda node: node.start(attempt, ranks[node.name])
        )
        refused = [answer for answer in answers.values() if isinstance(answer, Refused)]
        if len(answers) < len(names) or refused or folder.stop_asked is not None:
            answers = yield from self.launcher.ask_all(
                self.links, names, lambda node: node.stop(attempt, 0.0)
            )
            folder.abandoned.update(dict.fromkeys(sorted(set(names) - answers.keys()), attempt))
            return self.code.STOPPED if folder.stop_asked is not None else "a node did not start"
        return ""

    def _watch(self, step: Any) -> Task:
        folder = self.folder
        if not self.started:
            half = yield from self._stop_half_started()
            if half is not None:
                return half
        self.started = True
        watch = Watch(self)
        yield from watch.run()
        phases = dict(watch.state.ends)
        silent = frozenset(name for name in watch.state.away if phases.get(name) is Phase.LOST)
        if set(phases.values()) == {Phase.FINISHED}:
            return self.code.RunEnded(None)
        lost = bool(silent) and not (folder.spares or folder.policy.min_nodes is not None)
        stopped = folder.stop_asked is not None
        failure = Failure("", step=folder.step, trains=True, stopped=stopped, awaited=lost)
        return self.code.RunEnded(failure, silent, silent | watch.state.left)

    def _stop_half_started(self) -> Task:
        """Stop an attempt that did not start on every node; None if it did, or if nobody knows."""
        folder = self.folder
        attempt, names = folder.attempt, [node.name for node in folder.nodes]
        answers = yield from self.launcher.ask_all(self.links, names, lambda node: _wrap(node.state(attempt)))
        if all(answer != (None,) for answer in answers.values()):
            return None
        answers = yield from self.launcher.ask_all(self.links, names, lambda node: node.stop(attempt, 0.0))
        stopped = folder.stop_asked is not None
        silent = frozenset(names) - answers.keys()
        failure = Failure("half started", step=folder.step, trains=True, stopped=stopped)
        return self.code.RunEnded(failure, silent, silent)


def _wrap(task: Task) -> Task:
    return ((yield from task),)


class Watch:
    """Carries out what the decisions about one attempt say."""

    def __init__(self, controller: Controller) -> None:
        self.controller, self.clock, self.code = controller, controller.clock, controller.code
        self.launcher, self.network, self.folder = controller.launcher, controller.network, controller.folder
        self.attempt = self.folder.attempt
        names = frozenset(self.folder.members())
        policy = self.folder.policy
        patience = max(policy.node_lost_after - 10.0, 1.0) if policy.max else 60.0
        self.state = self.code.begin(
            names, self.clock.now, patience=patience, grace=GRACE, has_spares=bool(self.folder.spares)
        )
        self.queue: list[Any] = []
        self.woken = Result()
        self.links: dict[str, Link] = {}
        self.tasks: dict[Process, None] = {}

    def put(self, event: Any) -> None:
        self.queue.append(event)
        woken, self.woken = self.woken, Result()
        woken.set()

    def run(self) -> Task:
        try:
            for name in sorted(self.state.nodes):
                self._spawn(self._follow(name))
            while not self.state.is_over:
                self._decide(self.code.Tick(self._quiet()))
                if self.folder.stop_asked is not None and not self.state.by_user:
                    self._decide(self.code.StopAsked(self.code.StopRequest(GRACE)))
                if not self.queue:
                    yield Within(self.woken, 0.2 if self._is_busy() else 30.0)
                while self.queue:
                    self._decide(self.queue.pop(0))
        finally:
            for task in list(self.tasks):
                task.kill()
            for link in list(self.links.values()):
                self.network.close(link)

    def _is_busy(self) -> bool:
        return bool(self.state.away or self.state.due or self.state.asked)

    def _quiet(self) -> float:
        left = [
            name for name in self.state.nodes if name not in self.state.ends and name not in self.state.away
        ]
        return min((self.network.silent_for(name) for name in left), default=float("inf"))

    def _spawn(self, task: Task) -> None:
        process = Process(self.clock, self.launcher, task)
        self.tasks[process] = None
        process.done.waiting.append(lambda: self.tasks.pop(process, None))

    def _decide(self, event: Any) -> None:
        before = self.state
        self.state, actions = self.code.watch(self.state, event, self.clock.now)
        for action in actions:
            name = type(action).__name__
            if name == "Dial":
                self._spawn(self._follow(action.name, 1.0))
            elif name == "SendStop":
                self._spawn(self._send_stop(action))
            elif name == "CallRoll":
                self._spawn(self._call_roll(action))
            elif name == "AskSpares":
                self._spawn(self._ask_spares())
            elif name in ("Say", "Lose"):
                self.launcher.say(action.text)
            elif action.kind == "failed" and before.request is None:
                self.folder.blamed.append((self.attempt, action.name, action.fact))

    def _follow(self, name: str, pause: float = 0.0) -> Task:
        yield pause
        code, began = self.code, self.clock.now
        try:
            link = self.links[name] = yield from self.network.connect(name)
            self.put(code.Reached(frozenset([name])))
            node, attempt = self.launcher.nodes[name], self.attempt
            ended = yield self.network.call(
                link, lambda: node.follow(attempt, link, lambda *report: self._report(name, *report))
            )
            self.put(code.Ended(frozenset([name]), Phase(ended)))
        except NoLink as broken:
            since = began if str(broken) in ("no answer", "no address") else self.clock.now
            self.put(code.Broken(name, since, f"{name}: {broken}", str(broken) == "no address"))

    def _report(self, name: str, word: str, value: Any) -> None:
        if word == "failure":
            self.put(self.code.Failed(name, value["rank"], value.get("hang")))
        else:
            self.put(self.code.Stuck(name, value, 20.0, "stuck"))

    def _send_stop(self, action: Any) -> Task:
        grace, hang, attempt = action.request.grace, action.request.hang, self.attempt

        def work(node: Node) -> Task:
            mine = hang is not None and hang.node == node.name
            return node.stop(attempt, grace, hang.as_failure() if mine else None)

        answers = yield from self.launcher.ask_all(self.links, sorted(action.names), work)
        self.put(self.code.Answered(frozenset(answers), action.names - answers.keys()))

    def _call_roll(self, action: Any) -> Task:
        yield 2.0
        self.put(self.code.Rolled(action.request))

    def _ask_spares(self) -> Task:
        names = [spare.name for spare in self.folder.spares]
        answers = yield from self.launcher.ask_all({}, names, lambda node: node.hello(0))
        self.put(self.code.SparesAsked(bool(answers)))
