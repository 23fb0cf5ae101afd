"""The controller of a run: the process that copies its output to this machine, decides on restarts, and records the
end.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
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
from clusterctl.jobs.restarts import Failure, History, Restart
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.store import last_lines
from clusterctl.runs import abandoned
from clusterctl.runs import start as runs
from clusterctl.runs.carry import Carrier
from clusterctl.runs.causes.cause import read_cause, record_end
from clusterctl.runs.causes.patterns import PORT_PASSES
from clusterctl.runs.decide.attempt import PATIENCE, StopRequest
from clusterctl.runs.decide.run import (
    STOPPED,
    Announce,
    CheckSpares,
    Clear,
    Conclusion,
    Ended,
    Members,
    ReadMembers,
    Start,
    Step,
    Wait,
    Watch,
    choose,
    control,
)
from clusterctl.runs.finish import conclude, ended
from clusterctl.runs.notify import Notifier
from clusterctl.runs.prepare.stage import Stored, Tell
from clusterctl.runs.query import query_nodes
from clusterctl.runs.state import RunState, end_half_line, write_state
from clusterctl.runs.stop import send_stop, stop_nodes
from clusterctl.runs.watching.roller import Roller
from clusterctl.runs.watching.stall import Stragglers
from clusterctl.runs.watching.updates import Update
from clusterctl.runs.watching.watch import RunWatcher
from clusterctl.text import plural
from clusterctl.wire.typed_json import BadValue, decode

if TYPE_CHECKING:
    from clusterctl.jobs.run_lines import Event
    from clusterctl.transport.connection import Connection
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
        # How the last attempt ended, and the nodes on which its ranks may still run.
        self.state, self.left = RunState(Phase.UNKNOWN, {}), frozenset[str]()
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
        process, result = control(self.policy, self._history(), self._fits), None
        try:
            while True:
                step = process.send(result)
                if isinstance(step, Watch):
                    result = yield from self._watch()
                else:
                    result = self._carry_out(step)
                    if isinstance(step, Announce) and not result:
                        yield Update(note=step.decision.why)
        except StopIteration as end:
            self._conclude(end.value)
        finally:
            self.closed.set()
            if self.carrier:
                self.carrier.close()
            for copier in self.copiers:
                copier.close()

    def _carry_out(self, step: Step) -> Any:
        """Do one step that shows nothing; return its result."""
        match step:
            case Announce():
                return self._announce(step)
            case Wait():
                write_state(self.run, replace(self.state, phase=Phase.RESTARTING, verdict=step.why))
                return self._wait(step.seconds)
            case ReadMembers():
                record = self.run.read_record()
                return Members(record.cluster.nodes, record.spares, record.full_size)
            case Clear():
                return self._clear(step.nodes)
            case CheckSpares():
                record = self.run.read_record()
                stored = Stored(record.code_paths, record.data_paths)
                return self._answering(step.nodes, lambda node, link: runs.check_stored(node, link, stored))
            case Start():
                return self._start(step)

    def _watch(self) -> Generator[Update, None, Ended]:
        """Watch one attempt to its end; return how it ended."""
        self.state = state = yield from self._attempt()
        self.started = True
        silent = frozenset(state.unreachable)
        if state.phase is Phase.FINISHED:
            return Ended(None)
        grows = self.growing.is_set() and state.phase is Phase.STOPPED and not self.run.stop_asked.exists()
        return Ended(Failure("") if grows else self._failure(state), silent, silent | self.left, grows)

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
        lost = [name for name, phase in watch.state.ends.items() if phase is Phase.LOST]
        self.left = watch.state.left
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

    def _announce(self, step: Announce) -> str:
        if reason := self._missing_variables():
            return reason
        decision = step.decision
        kind = "restart" if decision.history.restarts > step.before.restarts else "new_port"
        self.run.add_event(
            kind, why=decision.why, text=decision.why, wait=decision.wait, **asdict(decision.history)
        )
        self.notify("restart", decision.why)
        return ""

    def _failure(self, state: RunState) -> Failure:
        record, first = self.run.read_record(), state.failure
        gone = [name for name, phase in state.nodes.items() if phase is Phase.LOST]
        cause = record_end(self.run, state)
        log = ""
        if first:
            log = "\n".join(last_lines(self.run.log(first.node, first.rank, "err", record.attempt), 20))
        started = [event for event in self.run.event_lines() if event.kind == "started"]
        port = started[-1].facts.get("port") if started and not self.job.master_port else None
        return Failure(
            what=cause.title if cause else state.phase,
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
            awaited=not (record.spares or self.policy.min_nodes is not None)
            and any(name in state.unreachable for name in gone),
        )

    def _history(self) -> History:
        """Return the failures since a user started or resumed the run, from its events."""
        history = History()
        for event in self.run.event_lines():
            if event.kind == "resumed":
                history = History()
            elif event.kind in ("restart", "new_port"):
                history = history_of(event)
        return history

    def _conclude(self, end: Conclusion) -> None:
        state = self.state
        if self.run.stop_asked.exists() and state.phase is not Phase.FINISHED:
            state = replace(state, phase=Phase.STOPPED)
        for copier in self.copiers:
            if copier.after_failures or state.phase in (Phase.FINISHED, Phase.STOPPED):
                copier.finish()
        with self.writing:
            abandoned.note(self.run, end.attempt.left)
        state = conclude(self.run, self.connections, replace(state, verdict=end.verdict))
        cause = read_cause(self.run) if state.phase is not Phase.FINISHED else None
        self.notify(
            "failed" if state.phase is Phase.LOST else state.phase.value,
            cause.title if cause else end.verdict or state.phase.value,
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

    def _start(self, step: Start) -> str:
        """Start the next attempt; return why that failed, or ""."""
        before = self.run.read_record()
        cluster, nodes = before.cluster, step.nodes
        try:
            with self.writing:
                self._move(cluster.nodes, nodes, step.spares)
                # The files of a lost node are missing from its checkpoints; the copies on this machine are complete.
                lost = {node.name for node in cluster.nodes} - {node.name for node in nodes}
                moved = bool(lost) or nodes[0].name != cluster.nodes[0].name
                put = self.carrier.put if self.carrier and moved else lambda made: None
                runs.start_next(
                    self.run, replace(cluster, nodes=nodes), self.connections, lambda *_: None, put
                )
        except ClusterctlError as error:
            # A spare on which no rank started becomes a spare again.
            if self.run.read_record().attempt == before.attempt:
                self.run.write_record(before)
            write_state(self.run, replace(self.state, phase=Phase.RESTARTING))
            return STOPPED if self.run.stop_asked.exists() else error.message
        return ""

    def _wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.run.stop_asked.exists():
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.1))
        return False

    def _clear(self, nodes: Sequence[Node]) -> set[str]:
        """End leftover processes of the previous attempt on nodes; return the names of those that answered."""
        record = self.run.read_record()

        def clear(node: Node, link: Connection) -> None:
            link.call(
                "stop", {"run_dir": record.run_dirs[node.name], "attempt": record.attempt, "grace": 0.0}
            )

        return self._answering(nodes, clear)

    def _answering(self, nodes: Sequence[Node], work: Callable[[Node, Connection], None]) -> set[str]:
        return {outcome.node.name for outcome in self.connections.on_each(nodes, work) if outcome.ok}

    def _fits(self, nodes: Sequence[Node]) -> bool:
        """Return True if the job can run on these nodes."""
        cluster = replace(self.run.read_record().cluster, nodes=tuple(nodes))
        try:
            # A command of `notify` that is gone meanwhile is no reason against a node.
            job_check.check(replace(self.job, notify=""), cluster)
        except InputFaults:
            return False
        return bool(nodes)

    def _chosen(self) -> tuple[Sequence[Node], Sequence[Node]]:
        """Return the nodes of an attempt that could start now, and the spares that are left."""
        process = choose(self._carry_out(ReadMembers()), set(), self.policy, self._fits)
        result = None
        try:
            while True:
                result = self._carry_out(process.send(result))
        except StopIteration as end:
            nodes, spares = end.value
            return nodes, spares

    def _grow(self) -> None:
        """End an attempt that has fewer nodes than the run began with, if the next one can have more."""
        record = self.run.read_record()
        nodes = record.cluster.nodes
        if self.growing.is_set() or len(nodes) >= record.full_size or not record.spares:
            return
        with contextlib.suppress(ClusterctlError):
            more = len(self._chosen()[0]) - len(nodes)
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
            nodes, spares = self._chosen()
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
    outcomes = send_stop(connections, run.read_record().cluster.nodes, run, StopRequest(0.0))
    missed = {outcome.node.name: str(outcome.error) for outcome in outcomes if not outcome.ok}
    return replace(state, phase=Phase.FAILED, unreachable={**state.unreachable, **missed})
