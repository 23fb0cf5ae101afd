"""The controller of a run: the process that copies its output to this machine, decides on restarts, and records the
end.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from clusterctl.agent.frames import SILENCE
from clusterctl.checkpoints.copies import copier_for
from clusterctl.checkpoints.find import shared_folder
from clusterctl.checkpoints.pod_uploads import uploader_for
from clusterctl.errors import ClusterctlError, InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job_check
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import Abandoned, RunRecord
from clusterctl.jobs.restarts import Decision, Failure, History, Restart, decide, membership
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.store import last_lines
from clusterctl.runs import abandoned
from clusterctl.runs import start as runs
from clusterctl.runs.carry import Carrier
from clusterctl.runs.causes.cause import read_cause, record_end
from clusterctl.runs.causes.patterns import PORT_PASSES
from clusterctl.runs.finish import conclude, ended
from clusterctl.runs.notify import Notifier
from clusterctl.runs.prepare.stage import Stored, Tell
from clusterctl.runs.query import query_nodes
from clusterctl.runs.state import RunState, end_half_line, write_state
from clusterctl.runs.stop import StopRequest, stop_nodes
from clusterctl.runs.watching.roller import Roller
from clusterctl.runs.watching.stall import Stragglers
from clusterctl.runs.watching.updates import Update
from clusterctl.runs.watching.watch import PATIENCE, RunWatcher
from clusterctl.text import plural
from clusterctl.wire.typed_json import BadValue, decode

if TYPE_CHECKING:
    from clusterctl.jobs.run_lines import Event
    from clusterctl.transport.fanout import Connections

# Seconds between two attempts to end leftover processes on abandoned nodes.
CHASE = 5.0
# Seconds for the nodes to report the state of an attempt before it is watched without the reports.
QUERY_LIMIT = 2.0


class Control:
    """Iterate over what happens in a run, attempt after attempt, until its end is recorded."""

    def __init__(
        self, run: RunDir, connections: Connections, lines: bool = True, *, started: bool = False
    ) -> None:
        """`started`: this process has just started the attempt, on every node."""
        self.run, self.connections, self.lines, self.started = run, connections, lines, started
        record = run.read_record()
        record.require_known_format()
        self.job = record.job
        self.policy = self.job.restart or Restart(max=0)
        self.closed = threading.Event()
        self.notify = Notifier(run, record)
        moves = self.job.restart is not None and (
            self.policy.min_nodes or self.policy.spare_nodes or record.spares
        )
        found = (copier_for(run, connections), uploader_for(run, connections))
        self.copiers = [copier for copier in found if copier is not None]
        # If nodes copy checkpoints to each other or to a store, or share a disk, no copy on this machine is needed.
        alone = not self.copiers and not shared_folder(record)
        self.carrier = Carrier(run, connections) if moves and alone and self.job.train is not None else None
        # Why the last attempt could not start.
        self.refused = ""
        # Two threads write the record: the one for abandoned nodes, and this one at a restart.
        self.writing = threading.Lock()
        # Whether the controller ended the attempt in order to use more nodes.
        self.growing = threading.Event()

    def __iter__(self) -> Iterator[Update]:
        threading.Thread(target=self._chase, daemon=True, name="chase").start()
        if self.carrier:
            self.carrier.start()
        for copier in self.copiers:
            copier.start()
        if reason := self._missing_variables():
            yield self._note(reason)
        try:
            while True:
                state = yield from self._attempt()
                decision = self._decide(state)
                if not decision.again:
                    return self._conclude(state, decision)
                yield Update(note=decision.why)
                while decision.again and not self._restart(state, decision):
                    failed = replace(state, failure=None, phase=Phase.FAILED)
                    decision = self._decide(failed, f"the next attempt could not start: {self.refused}")
                    yield Update(note=decision.why)
                if not decision.again:
                    return self._conclude(state, decision)
                self.started = True
        finally:
            self.closed.set()
            if self.carrier:
                self.carrier.close()
            for copier in self.copiers:
                copier.close()

    def _attempt(self) -> Any:
        """Watch one attempt to its end; return how it ended."""
        began = time.monotonic()
        if not self.started and (state := stop_half_started(self.run, self.connections)) is not None:
            return state
        restarts = self.job.restart is not None
        patience = max(self.policy.node_lost_after - SILENCE, 1.0) if restarts else PATIENCE
        watch = RunWatcher(self.run, self.connections, lines=self.lines, patience=patience, since=began)
        paces = Stragglers(self.run.read_record().world_size)
        self.growing.clear()
        for update in watch:
            if update.note:
                self.run.add_event("note", node=update.node, text=update.note)
            if self.carrier:
                self.carrier.note(update)
            saved = update.metric is not None and update.metric.kind == "checkpoint"
            for copier in self.copiers if saved else ():
                copier.note()
            self._tell(update)
            if update.pace:
                yield from self._stragglers(paces, update, watch.roller)
            if saved and self.policy.grow == "checkpoint":
                threading.Thread(target=self._grow, daemon=True, name="grow").start()
            yield update
        lost = [name for name, phase in watch.ends.items() if phase is Phase.LOST]
        state = ended(self.run, self.connections, watch.gone, lost, watch.reports)
        return replace(state, unreachable={**state.unreachable, **watch.nameless})

    def _tell(self, update: Update) -> None:
        """Call the job's `notify` for a hang and for a loss that is not finite."""
        if update.failure and update.failure.hang is not None:
            failed = update.failure
            self.notify.stalled(f"rank {failed.rank} on {update.node} hung for {failed.hang:g} s")
        elif update.hung:
            self.notify.stalled(update.note)
        if update.metric and update.metric.diverged:
            self.notify.not_finite(update.metric.step)

    def _stragglers(self, paces: Stragglers, update: Update, roller: Roller) -> Iterator[Update]:
        """Report the stragglers in a node's pace, each once per attempt; they are not stopped."""
        record = self.run.read_record()
        own = record.ranks[update.node]
        for slow in paces.note({rank: pace for rank, pace in update.pace.items() if rank in own}):
            node = record.node_of(slow.rank) or update.node
            device = record.device_of(node, slow.rank)
            text = slow.describe(node, device)
            times = round(slow.times, 2)
            facts = {"rank": slow.rank, "device": device, "times": times, "seconds": slow.seconds}
            self.run.add_event("straggler", node=node, **facts, text=text)
            roller.report_slow(node, slow.rank)
            yield Update(node=node, note=text)

    def _note(self, text: str) -> Update:
        if text:
            self.run.add_event("note", text=text)
        return Update(note=text)

    # -- after the end of an attempt

    def _decide(self, state: RunState, subject: str = "") -> Decision:
        if state.phase is Phase.FINISHED:
            return Decision(False, "")
        history = self._history()
        if self.growing.is_set() and state.phase is Phase.STOPPED and not self.run.stop_asked.exists():
            # This is not a failure, so it does not count as a restart.
            return Decision(True, "", history=history)
        decision = decide(self.policy, history, self._failure(state, subject))
        if decision.again and (reason := self._missing_variables()):
            # The next attempt would fail to start, again and again: this does not count as a restart.
            return Decision(False, f"not restarted: {reason}", history=history)
        if decision.again:
            why = decision.why
            kind = "restart" if decision.history.restarts > history.restarts else "new_port"
            self.run.add_event(kind, why=why, text=why, wait=decision.wait, **asdict(decision.history))
            self.notify("restart", why)
        return decision

    def _failure(self, state: RunState, subject: str) -> Failure:
        record, first = self.run.read_record(), state.failure
        gone = [name for name, phase in state.nodes.items() if phase is Phase.LOST]
        cause = None if subject else record_end(self.run, state)
        log = ""
        if first:
            log = "\n".join(last_lines(self.run.log(first.node, first.rank, "err", record.attempt), 20))
        started = [event for event in self.run.event_lines() if event.kind == "started"]
        port = started[-1].facts.get("port") if started and not self.job.master_port else None
        return Failure(
            what=subject or (cause.title if cause else state.phase),
            step=(state.step.step or 0) if state.step else 0,
            seconds=time.time() - started[-1].time if started else 0.0,
            trains=self.job.train is not None,
            exit_code=first.exit_code if first and not gone else None,
            log=log,
            passes=cause.passes if cause else "",
            port_taken=cause is not None
            and cause.passes == PORT_PASSES
            and f"{port}" in re.findall(r"\d+", log),
            mistaken=bool(first and first.world),
            stopped=state.phase is Phase.STOPPED or self.run.stop_asked.exists(),
            awaited=not self._replaceable() and any(name in state.unreachable for name in gone),
        )

    def _replaceable(self) -> bool:
        """Return True if the run can continue without a lost node."""
        return bool(self.run.read_record().spares) or self.policy.min_nodes is not None

    def _history(self) -> History:
        """Return the failures since a user started or resumed the run, from its events."""
        history = History()
        for event in self.run.event_lines():
            if event.kind == "resumed":
                history = History()
            elif event.kind in ("restart", "new_port"):
                history = history_of(event)
        return history

    def _conclude(self, state: RunState, decision: Decision) -> None:
        if self.run.stop_asked.exists() and state.phase is not Phase.FINISHED:
            state = replace(state, phase=Phase.STOPPED)
        for copier in self.copiers:
            if copier.after_failures or state.phase in (Phase.FINISHED, Phase.STOPPED):
                copier.finish()
        with self.writing:
            abandoned.note(self.run, state.unreachable)
        state = conclude(self.run, self.connections, replace(state, verdict=decision.why))
        cause = read_cause(self.run) if state.phase is not Phase.FINISHED else None
        self.notify(
            "failed" if state.phase is Phase.LOST else state.phase.value,
            cause.title if cause else decision.why or state.phase.value,
        )
        self.notify.close()

    # -- the next attempt

    def _missing_variables(self) -> str:
        """Return why no further attempt can start from this process; empty if it can."""
        missing = job_check.missing_variables(self.job)
        if not missing or self.job.restart is None or self.policy.max <= 0:
            return ""
        names = ", ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        return (
            f"{names} {verb} not set where the controller runs: it cannot restart the run;"
            f" set it and use `clusterctl attach --take-over {self.run.run_id}`"
        )

    def _restart(self, state: RunState, decision: Decision) -> bool:
        """Wait, choose the nodes and start; return False if that failed, or if the user asked to stop the run."""
        waiting = replace(state, phase=Phase.RESTARTING, verdict=decision.why)
        write_state(self.run, waiting)
        self.refused = "it was stopped"
        if not self._wait(decision.wait):
            return False
        cluster = self.run.read_record().cluster
        nodes, spares = self._membership(self._lost(cluster.nodes, state.unreachable))
        before = self.run.read_record()
        try:
            with self.writing:
                self._move(cluster.nodes, nodes, spares)
                # The files of a lost node are missing from its checkpoints; the copies on this machine are complete.
                lost = {node.name for node in cluster.nodes} - {node.name for node in nodes}
                moved = bool(lost) or nodes[0].name != cluster.nodes[0].name
                put = self.carrier.put if self.carrier and moved else lambda made: None
                cluster = replace(cluster, nodes=tuple(nodes))
                runs.start_next(self.run, cluster, self.connections, lambda *_: None, put)
        except ClusterctlError as error:
            self.refused = error.message
            # A spare on which no rank started becomes a spare again.
            if self.run.read_record().attempt == before.attempt:
                self.run.write_record(before)
            write_state(self.run, waiting)
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
        """End leftover processes of the previous attempt on every node; return the names of nodes that do not answer.

        A lost node is contacted again only if no other node can replace it: connecting to a dead machine takes 10 s or
        more.
        """
        record, replaceable = self.run.read_record(), self._replaceable()
        candidates = [node for node in nodes if not (replaceable and node.name in silent)]

        def clear(node: Node, link: Any) -> None:
            link.call(
                "stop", {"run_dir": record.run_dirs[node.name], "attempt": record.attempt, "grace": 0.0}
            )

        outcomes = self.connections.on_each(candidates, clear)
        answered = {outcome.node.name for outcome in outcomes if outcome.ok}
        return {node.name for node in nodes} - answered

    def _membership(self, lost: set[str]) -> tuple[list[Node], list[Node]]:
        record = self.run.read_record()
        cluster, spares, full = record.cluster, list(record.spares), record.full_size

        def fits(nodes: Sequence[Node]) -> bool:
            try:
                # A command of `notify` that is gone meanwhile is no reason against a node.
                job = replace(self.job, notify="")
                job_check.check(job, replace(cluster, nodes=tuple(nodes)))
            except InputFaults:
                return False
            return bool(nodes)

        if lost or len(cluster.nodes) < full:
            stored = Stored(record.code_paths, record.data_paths)
            outcomes = self.connections.on_each(
                spares, lambda node, link: runs.check_stored(node, link, stored)
            )
            lost = lost | {outcome.node.name for outcome in outcomes if not outcome.ok}
        return membership(cluster.nodes, spares, lost, self.policy.min_nodes, fits, full)

    def _grow(self) -> None:
        """End an attempt that has fewer nodes than the run began with, if the next one can have more."""
        record = self.run.read_record()
        nodes = record.cluster.nodes
        if self.growing.is_set() or len(nodes) >= record.full_size or not record.spares:
            return
        with contextlib.suppress(ClusterctlError):
            more = len(self._membership(set())[0]) - len(nodes)
            if more > 0:
                self.growing.set()
                self._note(
                    f"{plural(more, 'node')} can be used again: this attempt ends after its checkpoint"
                )
                stop_nodes(self.connections, nodes, self.run, StopRequest(self.job.grace))

    def _move(self, before: Sequence[Node], after: Sequence[Node], spares: Sequence[Node]) -> None:
        """Record which nodes left the run and which joined it, so that a later controller knows it too."""
        record = self.run.read_record()
        staying = {node.name for node in after}
        left = [node for node in before if node.name not in staying]
        joined = [node.name for node in after if node not in before]
        if not left and not joined:
            return
        given_up = [Abandoned(node, record.run_dirs[node.name], record.attempt) for node in left]
        record = replace(record, abandoned=(*record.abandoned, *given_up), spares=tuple(spares))
        if after[0].name != before[0].name:
            record = replace(record, metrics_base=end_half_line(self.run))
        self.run.write_record(record)
        parts = [f"without {', '.join(node.name for node in left)}" if left else ""]
        parts += [f"with {', '.join(joined)}" if joined else ""]
        self._note(", ".join(filter(None, parts)))

    def _chase(self) -> None:
        """End the ranks on abandoned nodes as soon as these answer again."""
        while not self.closed.wait(CHASE):
            abandoned.clear(self.run, self.connections, lambda: self.writing)

    def resume(self, tell: Tell) -> None:
        """Start a run again that has ended, on as many nodes as it began with if they answer."""
        cluster = self.run.read_record().cluster
        before: list[RunRecord] = []

        def chosen() -> Cluster:
            abandoned.clear(self.run, self.connections)
            before.append(self.run.read_record())
            nodes, spares = self._membership(set())
            self._move(cluster.nodes, nodes, spares)
            return replace(cluster, nodes=tuple(nodes))

        try:
            runs.resume(self.run, self.connections, tell, chosen)
        except BaseException:
            # Nothing started, so that no node has joined or left.
            if before and self.run.read_record().attempt == before[0].attempt:
                self.run.write_record(before[0])
            raise


def history_of(event: Event) -> History:
    """Return the history that a `restart` event holds; a damaged one counts as the first restart."""
    try:
        return decode(History, dict(event.facts))
    except BadValue:
        return History(restarts=1)


def stop_half_started(run: RunDir, connections: Connections) -> RunState | None:
    """Stop an attempt that did not start on every node, and return its state; None if it did.

    The previous controller may have died after it wrote the record and before every node had started.
    """
    state = query_nodes(run, connections, patience=QUERY_LIMIT)
    answered = (name for name in state.nodes if name not in state.unreachable)
    if not any(state.nodes[name] is Phase.UNKNOWN for name in answered):
        return None
    stop_nodes(connections, run.read_record().cluster.nodes, run, StopRequest(0.0))
    return replace(state, phase=Phase.FAILED)
