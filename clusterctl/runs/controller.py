"""The one process that is in charge of a run: it brings the run home, decides on restarts, writes the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from clusterctl.agent.frames import SILENCE
from clusterctl.agent.processes import identity, is_alive
from clusterctl.errors import ClusterctlError, InputFaults, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs.record import (
    cluster_of,
    job_of,
    size_of,
    spares_of,
)
from clusterctl.jobs.restarts import (
    Decision,
    Failure,
    History,
    Restart,
    decide,
    membership,
)
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.store import last_lines
from clusterctl.runs import abandoned
from clusterctl.runs import start as runs
from clusterctl.runs.carry import Carrier
from clusterctl.runs.cause import keep_cause
from clusterctl.runs.finish import conclude, ended
from clusterctl.runs.stage import Stored, Tell
from clusterctl.runs.stall import Stragglers
from clusterctl.runs.state import FINAL, RESTARTING, RunState, query_nodes
from clusterctl.runs.stop import stop_nodes
from clusterctl.runs.watch import (
    PATIENCE,
    KeptWatch,
    Update,
    Watch,
)
from clusterctl.text import plural
from clusterctl.transport.fanout import raise_failures

if TYPE_CHECKING:
    from clusterctl.transport.fanout import Connections, Outcome

READY = b"in charge\n"
# Seconds for a new controller to log in to every node.
READY_LIMIT = 60.0
# Seconds for the nodes to say what there is of an attempt, before it is watched anyway.
ASKED = 2.0
# Seconds between two tries to end what runs on a node that was given up.
CHASE = 5.0
# Seconds that a controller which is replaced has to go.
LEAVE = 5.0


class Control:
    """A run from one attempt to the next, until its end is written; what is seen on the way is told."""

    def __init__(self, run: RunDir, connections: Connections, lines: bool = True) -> None:
        self.run, self.connections, self.lines = run, connections, lines
        self.job = job_of(run)
        self.policy = self.job.restart or Restart(max=0)
        self.closed = threading.Event()
        moves = self.job.restart is not None and (
            self.policy.min_nodes or self.policy.spare_nodes or spares_of(run)
        )
        self.carrier = Carrier(run, connections) if moves and self.job.train is not None else None
        # Why the last start did not come about.
        self.refused = ""
        # The record has two writers: the chase, and a restart.
        self.writing = threading.Lock()
        # The attempt was ended by us, to take in nodes that are there again.
        self.growing = threading.Event()

    def __iter__(self) -> Iterator[Update]:
        threading.Thread(target=self._chase, daemon=True, name="chase").start()
        if self.carrier:
            self.carrier.start()
        try:
            while True:
                state = yield from self._attempt()
                decision = self._decide(state)
                if not decision.again:
                    return self._conclude(state, decision)
                yield Update(note=decision.why)
                while decision.again and not self._restart(state, decision):
                    failed = replace(state, failure=None, phase="failed")
                    decision = self._decide(failed, f"the next attempt could not start: {self.refused}")
                    yield Update(note=decision.why)
                if not decision.again:
                    return self._conclude(state, decision)
        finally:
            self.closed.set()
            if self.carrier:
                self.carrier.close()

    def _attempt(self) -> Any:
        """Watch one attempt to its end; gives how it came out."""
        began = time.monotonic()
        state = query_nodes(self.run, self.connections, patience=ASKED)
        if any(phase == "unknown" and name not in state.unreachable for name, phase in state.nodes.items()):
            # The controller before this one died between the attempt's record and its start on every node.
            stop_nodes(self.connections, cluster_of(self.run).nodes, self.run, grace=0.0)
            return replace(state, phase="failed")
        restarts = self.job.restart is not None
        patience = max(self.policy.node_lost_after - SILENCE, 1.0) if restarts else PATIENCE
        watch = Watch(self.run, self.connections, lines=self.lines, patience=patience, since=began)
        paces = Stragglers(sum(map(len, self.run.read_record()["ranks"].values())))
        self.growing.clear()
        for update in watch:
            if update.note:
                self.run.add_event("note", node=update.node, text=update.note)
            if self.carrier:
                self.carrier.look(update)
            if update.pace:
                yield from self._stragglers(paces, update)
            if (update.metric or {}).get("event") == "checkpoint" and self.policy.grow == "checkpoint":
                threading.Thread(target=self._grow, daemon=True, name="grow").start()
            yield update
        lost = [name for name, how in watch.ends.items() if how == "lost"]
        return ended(self.run, self.connections, watch.gone, lost)

    def _stragglers(self, paces: Stragglers, update: Update) -> Iterator[Update]:
        """Name the ranks that hold up the others; once an attempt, and nothing is done to them."""
        record = self.run.read_record()
        its = {rank: seconds for rank, seconds in update.pace.items() if rank in record["ranks"][update.node]}
        for one in paces.note(its):
            node = next(name for name, ranks in record["ranks"].items() if one.rank in ranks)
            device = record["devices"][node][record["ranks"][node].index(one.rank)]
            text = one.words(node, device)
            facts = {"rank": one.rank, "device": device, "times": round(one.times, 2), "seconds": one.seconds}
            self.run.add_event("straggler", node=node, **facts, text=text)
            yield Update(node=node, note=text)

    def _note(self, text: str) -> Update:
        if text:
            self.run.add_event("note", text=text)
        return Update(note=text)

    # -- what follows an end

    def _decide(self, state: RunState, what: str = "") -> Decision:
        if state.phase == "finished":
            return Decision(False, "")
        history = self._history()
        if self.growing.is_set() and state.phase == "stopped" and not self.run.stop_asked.exists():
            # No failure: it counts against nothing.
            return Decision(True, "", history=history)
        decision = decide(self.policy, history, self._failure(state, what))
        if decision.again:
            why = decision.why
            self.run.add_event("restart", why=why, text=why, wait=decision.wait, **asdict(decision.history))
        return decision

    def _failure(self, state: RunState, what: str) -> Failure:
        record, one = self.run.read_record(), state.failure
        gone = [name for name, phase in state.nodes.items() if phase == "lost"]
        cause = None if what else keep_cause(self.run, state)
        attempt, said = record["attempt"], ""
        if one:
            said = "\n".join(last_lines(self.run.log(one["node"], one["rank"], "err", attempt), 20))
        started = [event["time"] for event in self.run.event_lines() if event["event"] == "started"]
        return Failure(
            what=what or (cause.title if cause else state.phase),
            step=int((state.step or {}).get("step", 0)),
            seconds=time.time() - started[-1] if started else 0.0,
            trains=self.job.train is not None,
            exit_code=one.get("exit_code") if one and not gone else None,
            said=said,
            stopped=state.phase == "stopped" or self.run.stop_asked.exists(),
            awaited=not self._replaceable() and any(name in state.unreachable for name in gone),
        )

    def _replaceable(self) -> bool:
        """Whether the run can go on without a node that is lost."""
        return bool(self.run.read_record()["spares"]) or self.policy.min_nodes is not None

    def _history(self) -> History:
        """The failures since a user started the run or resumed it, from the run's own history."""
        history = History()
        for event in self.run.event_lines():
            if event["event"] == "resumed":
                history = History()
            elif event["event"] == "restart":
                history = History(event["restarts"], event["stalled"], event["step"])
        return history

    def _conclude(self, state: RunState, decision: Decision) -> None:
        if self.run.stop_asked.exists() and state.phase != "finished":
            state = replace(state, phase="stopped")
        conclude(self.run, self.connections, replace(state, verdict=decision.why))

    # -- the next attempt

    def _restart(self, state: RunState, decision: Decision) -> bool:
        """Wait, choose the nodes, start; False where that failed or the user asked for the end."""
        waiting = replace(state, phase=RESTARTING, verdict=decision.why)
        self.run.write_json(self.run.state, asdict(waiting))
        self.refused = "it was stopped"
        if not self._wait(decision.wait):
            return False
        cluster = cluster_of(self.run)
        nodes, spares = self._membership(self._lost(cluster.nodes, state.unreachable))
        kept = self.run.read_record()
        try:
            with self.writing:
                self._move(cluster.nodes, nodes, spares)
                moved = self.carrier is not None and nodes[0].name != cluster.nodes[0].name
                before = self.carrier.put if self.carrier and moved else lambda made: None
                cluster = replace(cluster, nodes=tuple(nodes))
                runs.start_next(self.run, cluster, self.connections, lambda *_: None, before)
        except ClusterctlError as error:
            self.refused = error.message
            # A spare that never began is a spare again.
            if self.run.read_record()["attempt"] == kept["attempt"]:
                self.run.write_json(self.run.record, kept, mode=0o600)
            self.run.write_json(self.run.state, asdict(waiting))
            return False
        return True

    def _wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.run.stop_asked.exists():
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.1))
        return False

    def _lost(self, nodes: Sequence[Node], silent: Collection[str]) -> set[str]:
        """The nodes that don't answer; on all others nothing of the attempt before is left after this.

        A node that was silent for so long that it counted as lost is asked once more only where no other could
        stand in for it: a try to connect to a dead machine takes 10 s and more.
        """
        record, replaceable = self.run.read_record(), self._replaceable()
        asked = [node for node in nodes if not (replaceable and node.name in silent)]

        def clear(node: Node, link: Any) -> None:
            where = {"run_dir": record["run_dirs"][node.name], "attempt": record["attempt"], "grace": 0.0}
            link.call("stop", where)

        outcomes = self.connections.on_each(asked, clear)
        answered = {outcome.node.name for outcome in outcomes if outcome.ok}
        return {node.name for node in nodes} - answered

    def _membership(self, lost: set[str]) -> tuple[list[Node], list[Node]]:
        cluster = cluster_of(self.run)

        def fits(nodes: Sequence[Node]) -> bool:
            try:
                jobs.check(self.job, replace(cluster, nodes=tuple(nodes)))
            except InputFaults:
                return False
            return bool(nodes)

        spares, full = spares_of(self.run), size_of(self.run)
        if lost or len(cluster.nodes) < full:
            record = self.run.read_record()
            stored = Stored(record["code_paths"], record["data_paths"])
            outcomes = self.connections.on_each(
                spares, lambda node, link: runs.still_there(node, link, stored)
            )
            lost = lost | {outcome.node.name for outcome in outcomes if not outcome.ok}
        return membership(cluster.nodes, spares, lost, self.policy.min_nodes, fits, full)

    def _grow(self) -> None:
        """End an attempt on fewer nodes than the run began with, where the next one can have more."""
        nodes = cluster_of(self.run).nodes
        if self.growing.is_set() or len(nodes) >= size_of(self.run) or not spares_of(self.run):
            return
        with contextlib.suppress(ClusterctlError):
            more = len(self._membership(set())[0]) - len(nodes)
            if more > 0:
                self.growing.set()
                self._note(
                    f"{plural(more, 'node')} can be taken in again: this attempt ends after its checkpoint"
                )
                stop_nodes(self.connections, nodes, self.run, self.job.grace)

    def _move(self, before: Sequence[Node], after: Sequence[Node], spares: Sequence[Node]) -> None:
        """Write down who left and who came, so that a controller after this one knows it too."""
        record = self.run.read_record()
        stay = {node.name for node in after}
        left = [node for node in before if node.name not in stay]
        come = [node.name for node in after if node not in before]
        if not left and not come:
            return
        for node in left:
            where = {"run_dir": record["run_dirs"][node.name], "attempt": record["attempt"]}
            record["abandoned"].append({"node": asdict(node), **where})
        record["spares"] = [asdict(node) for node in spares]
        if after[0].name != before[0].name:
            record["metrics_base"] = _whole_lines(self.run)
        self.run.write_json(self.run.record, record, mode=0o600)
        parts = [f"without {', '.join(node.name for node in left)}" if left else ""]
        parts += [f"with {', '.join(come)}" if come else ""]
        self._note(", ".join(filter(None, parts)))

    def _chase(self) -> None:
        """A node that was given up may come back with its ranks: they are ended as soon as it answers."""
        while not self.closed.wait(CHASE):
            abandoned.clear(self.run, self.connections, self.writing)

    def resume(self, tell: Tell) -> None:
        """Start the run again, which has ended, on as many nodes as it began with where they answer again."""
        before = cluster_of(self.run)
        kept: dict[str, Any] = {}

        def chosen() -> Cluster:
            abandoned.clear(self.run, self.connections)
            kept.update(self.run.read_record())
            nodes, spares = self._membership(set())
            self._move(before.nodes, nodes, spares)
            return replace(before, nodes=tuple(nodes))

        try:
            runs.resume(self.run, self.connections, tell, chosen)
        except BaseException:
            # Nobody came, so nobody is missed.
            if kept and self.run.read_record()["attempt"] == kept["attempt"]:
                self.run.write_json(self.run.record, kept, mode=0o600)
            raise


def _whole_lines(run: RunDir) -> int:
    """End a half line of the metrics that came home from a node that is gone; gives the file's size."""
    if not run.metrics.exists():
        return 0
    with run.metrics.open("r+b") as file:
        if not file.read().endswith(b"\n") and file.tell():
            file.write(b"\n")
        return file.tell()


# -- the process


@contextlib.contextmanager
def following(
    run: RunDir, connections: Connections, first: int | None = None
) -> Iterator[Control | KeptWatch]:
    """The view of a run: what its controller brings home or has brought, or, where none could be started, our own."""
    with run.hold() as ours:
        ended = run.read_state().get("phase") in FINAL
        yield Control(run, connections) if ours and not ended else KeptWatch(run, first)


def serve(run: RunDir, connections: Connections, tell: Any) -> bool:
    """Be the run's controller until its end; False where a living one is it already. `tell` says when in charge."""
    with run.hold(patience=10.0) as ours:
        if not ours:
            return False
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        log_in(cluster_of(run).nodes, connections)
        tell()
        for _ in Control(run, connections, lines=False):
            pass
    return True


def finish_alone(run: RunDir, connections: Connections) -> None:
    """After a stop: where nobody is in charge the last lines come home by us, and the end is written."""
    if run.controller() is None and run.read_state().get("phase") not in FINAL:
        with following(run, connections) as watch:
            for _ in watch:
                pass


def log_in(nodes: Sequence[Node], connections: Connections) -> None:
    """Come back when one node has answered, or raise why none did: a key that serves for one serves for all, and a
    node that is silent just now is a matter of the watch."""
    answered = threading.Event()
    outcomes: list[Outcome[Any]] = []

    def note(outcome: Outcome[Any]) -> None:
        if outcome.ok:
            answered.set()

    def ask() -> None:
        outcomes.extend(connections.on_each(nodes, lambda node, link: link.hello(), on_outcome=note))

    asking = threading.Thread(target=ask, daemon=True, name="log in")
    asking.start()
    while asking.is_alive() and not answered.wait(0.02):
        continue
    if not answered.is_set():
        raise_failures(outcomes)


def start(run: RunDir, ssh: str) -> bool:
    """Put a process of its own in charge of a run, whatever becomes of this terminal; False where it can't.

    It comes back when the process has logged in to the nodes: one that would need a passphrase can't, and says why
    in controller.log.
    """
    argv = [sys.executable, "-m", "clusterctl", "control", "--ssh", ssh, str(run.root)]
    with run.controller_log.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    assert process.stdout is not None
    timer = threading.Timer(READY_LIMIT, process.kill)
    # An interrupt does not wait for it.
    timer.daemon = True
    timer.start()
    try:
        with process.stdout as said:
            ready = said.readline() == READY
    finally:
        timer.cancel()
    return ready or run.is_watched()


def end(run: RunDir) -> None:
    """End a run's controller, and nothing of the run."""
    pid = run.controller()
    if pid is None:
        return
    owner = identity(pid)
    for number, seconds in ((signal.SIGTERM, LEAVE), (signal.SIGKILL, LEAVE)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not is_alive(owner):
                return
            time.sleep(0.05)
    raise WorkFailed(
        f"process {pid}, the controller of {run.run_id}, does not end", "end it by hand, then again"
    )
