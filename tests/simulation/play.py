"""Play a run with faults from a seed, check what must always hold, and tell it as a timeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from clusterctl.inventory.cluster import Node as Place
from clusterctl.jobs.restarts import Restart
from tests.simulation.clock import Clock, Process, Task
from tests.simulation.decisions import decisions
from tests.simulation.launcher import Folder, Launcher
from tests.simulation.network import Network
from tests.simulation.node import Node

# Seconds after the last fault in which a run must come to rest.
SETTLES = 1500.0
# Seconds without a fault that a run needs to finish.
WORK = 400.0
# Seconds between two saved steps, the first of which is a while after the start.
STEPS = 20.0


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run."""

    at: float
    kind: str
    node: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} node{self.node + 1} for {self.seconds:.1f} s"


KINDS = {
    "rank fails": 3,
    "rank hangs": 1,
    "cut": 3,
    "cut there": 1,
    "cut back": 1,
    "cut all": 1,
    "no address": 1,
    "connection reset": 2,
    "pause": 2,
    "reboot": 2,
    "supervisor dies": 2,
    "supervisor hangs": 1,
    "disk full": 1,
    "controller dies": 2,
    "launcher pauses": 1,
    "stop": 3,
    "stop dies": 1,
    "resume": 2,
}


@dataclass(frozen=True)
class Plan:
    """The size of a cluster, its policy, and the faults."""

    seed: int
    nodes: int
    spares: int
    policy: Restart
    faults: tuple[Fault, ...]


@dataclass
class Played:
    """What happened: the broken rules, and the timeline."""

    plan: Plan
    broken: list[str] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    events: int = 0
    phase: str = ""

    def timeline(self) -> str:
        head = (
            f"seed {self.plan.seed}: {self.plan.nodes} nodes, {self.plan.spares} spares, {self.plan.policy}"
        )
        return "\n".join([head, *(f"{at:9.3f}  {text}" for at, text in self.lines), *self.broken])


def planned(seed: int, most: int = 8) -> Plan:
    """Draw a plan."""
    random = Random(seed)
    nodes, spares = random.randint(1, most), random.choice([0, 0, 1, 2])
    least = random.choice([None, 1, max(1, nodes - 1)])
    policy = Restart(max=random.choice([0, 2, 5]), backoff=random.choice([1.0, 10.0]), min_nodes=least)
    kinds = random.choices(list(KINDS), list(KINDS.values()), k=random.choice([1, 1, 2, 2, 3, 4, 6]))
    start = random.choice([0.0, 0.0, 30.0])
    faults = []
    for kind in kinds:
        # Many faults follow another closely: races are there.
        start += random.choice([random.random() * 0.02, random.random() * 3, random.random() * 40])
        seconds = random.choice([0.5, 5.0, 12.0, 40.0, 100.0, 700.0]) * (0.5 + random.random())
        faults.append(Fault(start, kind, random.randrange(nodes + spares), seconds))
    return Plan(seed, nodes, spares, policy, tuple(faults))


# Faults of the launcher and its connections: the ranks know nothing of them.
OUTSIDE = {"connection reset", "controller dies", "launcher pauses", "no address", "cut", "cut all"}
# Faults of one rank or node, which a restart cures.
CURED = {"rank fails", "rank hangs", "supervisor dies"}
# Faults of a node that a spare node cures.
REPLACED = {"reboot", "cut", "cut there", "cut back", "pause"}
# Seconds that a launch takes.
STARTED = 5.0


def must_last(plan: Plan) -> bool:
    """Return True if the first attempt must finish: the ranks are not hurt, and every silence is short enough."""
    limits = {"no address": 300.0, "cut all": 300.0, "cut": 13.5 if plan.nodes + plan.spares > 1 else 300.0}
    kinds = [fault.kind for fault in plan.faults]
    apart = len(kinds) == 1 or not {"cut", "cut all", "no address"} & set(kinds)
    return apart and all(
        fault.kind in OUTSIDE and fault.at > STARTED and fault.seconds < limits.get(fault.kind, 1e9)
        for fault in plan.faults
    )


def must_finish(plan: Plan) -> bool:
    """Return True if the run must finish after some restarts."""
    hurt = {fault.node for fault in plan.faults if fault.kind in REPLACED}
    survives = len(hurt) <= plan.spares if len(plan.faults) == 1 else plan.policy.min_nodes == 1
    apart = all(fault.kind in CURED | REPLACED and fault.at > STARTED for fault in plan.faults)
    return (
        apart
        and 2 + len(plan.faults) <= plan.policy.max + 1
        and (not hurt or (survives and len(hurt) < plan.nodes))
    )


class Play:
    """One run under a virtual clock."""

    def __init__(self, plan: Plan, bug: tuple[str, str, str] | None = None) -> None:
        self.plan, self.played = plan, Played(plan)
        self.random, self.clock = Random(plan.seed), Clock()
        machines: dict[str, Any] = {}
        self.network = Network(self.clock, self.random, machines)
        code = decisions(bug)
        for number in range(plan.nodes + plan.spares):
            name = f"node{number + 1}"
            machines[name] = Node(
                name,
                clock=self.clock,
                random=self.random,
                network=self.network,
                code=code,
                on_change=self.changed,
            )
        self.network.__init__(self.clock, self.random, machines)  # type: ignore[misc]
        self.nodes: dict[str, Node] = machines
        places = [Place(name, name, "") for name in machines]
        members, spares = tuple(places[: plan.nodes]), tuple(places[plan.nodes :])
        self.folder = Folder(members, spares, {}, plan.policy, full=plan.nodes)
        self.launcher = Launcher(self.clock, self.network, self.nodes, self.folder, code)
        self.launcher.say = self.say
        self.stops: list[Process] = []
        # By attempt: when all of its ranks had started, and whether one has ended badly.
        self.begun: dict[int, float] = {}
        self.hurt: set[int] = set()
        self.injected: dict[int, tuple[str, int]] = {}
        self.completed: set[int] = set()

    def say(self, text: str) -> None:
        self.played.lines.append((self.clock.now, text))

    def breaks(self, rule: str) -> None:
        text = f"{self.clock.now:9.3f}  BROKEN: {rule}"
        if text not in self.played.broken:
            self.played.broken.append(text)

    # -- what must always hold

    def changed(self, node: Node, word: str, attempt: int) -> None:
        """Check what must hold after each start and end of a rank."""
        living = node.living()
        if word == "start":
            attempts = {rank.attempt for rank in living}
            if len(attempts) > 1:
                self.breaks(f"{node.name} runs ranks of attempts {sorted(attempts)}")
            numbers = [rank.number for rank in living]
            if len(set(numbers)) < len(numbers):
                self.breaks(f"{node.name} runs a rank twice: {numbers}")
            if self.folder.is_over and self.folder.phase == "stopped":
                self.breaks(f"{node.name} starts a rank of a run that is over")
            whole = sum(len(other.living(attempt)) for other in self.nodes.values())
            if attempt == self.folder.attempt and whole == 2 * len(self.folder.nodes):
                self.begun.setdefault(attempt, self.clock.now)
                self.clock.at(WORK, lambda: self.complete(attempt))
                self.clock.at(STEPS, lambda: self.save(attempt))
        else:
            self.hurt.add(attempt)

    def save(self, attempt: int) -> None:
        """Finish a step, if all ranks live; later ones follow."""
        if self.folder.attempt == attempt and attempt not in self.hurt and not self.folder.is_over:
            self.folder.step += 1
            self.clock.at(STEPS, lambda: self.save(attempt))

    def complete(self, attempt: int) -> None:
        """All ranks end well, unless one is gone or hangs."""
        if attempt in self.hurt:
            return
        ranks = [(node, rank) for node in self.nodes.values() for rank in node.living(attempt)]
        if any(rank.hangs_since is not None for _, rank in ranks):
            return
        late = max(node.paused_until for node in self.nodes.values()) - self.clock.now
        if late > 0:
            self.clock.at(late + 0.1, lambda: self.complete(attempt))
            return
        self.completed.add(attempt)
        for node, rank in ranks:
            node.end_rank(rank, 0)

    def stop_returned(self, missed: Sequence[str]) -> None:
        """Nothing is left after `stop` has reached every node."""
        self.say(f"stop returns: {'not reached: ' + ' '.join(missed) if missed else 'all stopped'}")
        if missed:
            return
        for place in self.folder.nodes:
            if self.nodes[place.name].living():
                self.breaks(f"stop returned, and ranks live on {place.name}")

    def at_rest(self) -> None:
        """Long after the last fault, a run has ended, and nothing is left."""
        folder = self.folder
        living = {name: len(node.living()) for name, node in self.nodes.items() if node.living()}
        if not folder.is_over and self.launcher.has_controller():
            self.breaks(f"the run has not ended; its attempt is {folder.attempt}, living ranks: {living}")
        elif not folder.is_over:
            self.breaks("the run has no controller")
        elif living:
            self.breaks(f"the run is {folder.phase}, and ranks live: {living}")
        if folder.phase == "finished" and folder.attempt not in self.completed:
            self.breaks("the run is finished, and its ranks have not done their work")
        if must_last(self.plan) and (folder.phase, folder.attempt) != ("finished", 1):
            self.breaks(
                f"nothing happened to the ranks, and the run is {folder.phase} in attempt {folder.attempt}"
            )
        if must_finish(self.plan) and folder.phase != "finished":
            self.breaks(f"the run could go on, and is {folder.phase}: {folder.verdict}")
        for attempt, node, rank in folder.blamed:
            expected = self.injected.get(attempt)
            if expected and len(self.plan.faults) == 1 and expected != (node, rank):
                self.breaks(f"attempt {attempt}: rank {rank} on {node} is blamed, and {expected} failed")

    # -- faults

    def happen(self, fault: Fault) -> None:
        node = self.nodes[f"node{fault.node + 1}"]
        self.say(f"* {fault}")
        work = getattr(self, f"_{fault.kind.replace(' ', '_')}")
        work(node, fault.seconds)

    def _rank(self, node: Node) -> Any:
        living = [rank for rank in node.living() if rank.attempt == self.folder.attempt]
        return self.random.choice(living) if living else None

    def _rank_fails(self, node: Node, seconds: float) -> None:
        if rank := self._rank(node):
            self.injected.setdefault(rank.attempt, (node.name, rank.number))
            node.end_rank(rank, 1)

    def _rank_hangs(self, node: Node, seconds: float) -> None:
        rank = self._rank(node)
        supervisor = node.supervisors.get(self.folder.attempt)
        if rank and supervisor and supervisor.process.is_alive:
            self.injected.setdefault(rank.attempt, (node.name, rank.number))
            rank.hangs_since = self.clock.now
            self.hurt.add(rank.attempt)
            supervisor.hang(rank.number)

    def _cut(self, node: Node, seconds: float) -> None:
        self._cut_path([node], seconds, there=True, back=True)

    def _cut_there(self, node: Node, seconds: float) -> None:
        self._cut_path([node], seconds, there=True, back=False)

    def _cut_back(self, node: Node, seconds: float) -> None:
        self._cut_path([node], seconds, there=False, back=True)

    def _cut_all(self, node: Node, seconds: float) -> None:
        self._cut_path(list(self.nodes.values()), seconds, there=True, back=True)

    def _cut_path(self, nodes: Sequence[Node], seconds: float, *, there: bool, back: bool) -> None:
        for node in nodes:
            self.network.cut(node.name, there=there, back=back)
            self.clock.at(seconds, lambda name=node.name: self.network.heal(name))  # type: ignore[misc]

    def _no_address(self, node: Node, seconds: float) -> None:
        self.network.paths[node.name].resolves = False
        self.network.reset(node.name, "reset")
        self.clock.at(seconds, lambda: self.network.heal(node.name))

    def _connection_reset(self, node: Node, seconds: float) -> None:
        self.network.reset(node.name, "reset")

    def _pause(self, node: Node, seconds: float) -> None:
        node.paused_until = self.clock.now + seconds
        self.network.paths[node.name].since = self.clock.now
        self.network.give_up_later(node.name)

    def _reboot(self, node: Node, seconds: float) -> None:
        if node.is_up:
            self.network.paths[node.name].since = self.clock.now
            node.lose_power()
            self.network.give_up_later(node.name)
            self.clock.at(seconds, node.start_again)

    def _supervisor_dies(self, node: Node, seconds: float) -> None:
        supervisor = node.supervisors.get(self.folder.attempt)
        if supervisor:
            supervisor.process.kill()
            supervisor.freeze(stuck=False)

    def _supervisor_hangs(self, node: Node, seconds: float) -> None:
        supervisor = node.supervisors.get(self.folder.attempt)
        if supervisor and supervisor.process.is_alive:
            supervisor.freeze(stuck=True)
            self.clock.at(seconds, lambda: supervisor.freeze(stuck=False))

    def _disk_full(self, node: Node, seconds: float) -> None:
        node.fill(full=True)
        self.clock.at(seconds, lambda: node.fill(full=False))

    def _controller_dies(self, node: Node, seconds: float) -> None:
        if self.launcher.has_controller():
            self.launcher.controller.kill()
            # A user, or `attach`, puts another one in charge.
            self.clock.at(min(seconds, 60.0), self.launcher.take_over)

    def _launcher_pauses(self, node: Node, seconds: float) -> None:
        self.launcher.paused_until = self.clock.now + seconds

    def _stop(self, node: Node, seconds: float) -> None:
        process = Process(self.clock, self.launcher, self._stopped())
        self.stops.append(process)

    def _stopped(self) -> Task:
        self.stop_returned((yield from self.launcher.stop()))

    def _resume(self, node: Node, seconds: float) -> None:
        self.launcher.resume()

    def _stop_dies(self, node: Node, seconds: float) -> None:
        self._stop(node, seconds)
        process = self.stops[-1]
        self.clock.at(min(seconds, 20.0) * self.random.random() ** 3, process.kill)

    def play(self) -> Played:
        """Play it to its end; return what happened."""
        self.launcher.launch()
        for fault in self.plan.faults:
            self.clock.at(fault.at, lambda fault=fault: self.happen(fault))  # type: ignore[misc]
        last = max((fault.at + fault.seconds for fault in self.plan.faults), default=0.0)
        self.clock.run(last + SETTLES + WORK * (1 + self.plan.policy.max))
        self.at_rest()
        self.played.events, self.played.phase = self.clock.events, self.folder.phase
        return self.played


def play(plan: Plan, bug: tuple[str, str, str] | None = None) -> Played:
    """Play a plan; return what happened."""
    return Play(plan, bug).play()


def smallest(plan: Plan, bug: tuple[str, str, str] | None = None) -> Plan:
    """Return the plan with as few faults as still break a rule."""
    faults = list(plan.faults)
    for fault in plan.faults:
        fewer = [other for other in faults if other is not fault]
        if play(replace(plan, faults=tuple(fewer)), bug).broken:
            faults = fewer
    return replace(plan, faults=tuple(faults))


def main() -> None:
    """Play many seeds, and print the smallest plan that breaks a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.count):
        plan = planned(seed)
        played = play(plan)
        if played.broken or options.count == 1:
            print(play(smallest(plan)).timeline() if played.broken else played.timeline())
            if played.broken:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
