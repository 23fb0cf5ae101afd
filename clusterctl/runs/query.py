"""Ask the nodes of a run for its state."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from clusterctl.errors import LinkLost, UsageError
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.runs.causes.aftermath import with_aftermath, with_clock, with_error_files
from clusterctl.runs.causes.cause import read_cause, record_end
from clusterctl.runs.causes.roll_call import with_blame
from clusterctl.runs.state import (
    SUPERVISOR_SILENCE,
    Heartbeat,
    NodeAnswer,
    NodeFailure,
    RankPhase,
    RankState,
    RunState,
    SupervisorState,
    read_state,
    write_state,
)
from clusterctl.runs.watching.stall import is_number
from clusterctl.text import rank_text
from clusterctl.transport.fanout import Outcome, raise_failures, within

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_lines import Metric
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections


def current_state(run: RunDir, connections: Connections) -> RunState:
    """Return the state that the nodes report now, or the recorded one if they cannot be asked.

    Only a process that has copied the last output records an end: whoever finds a recorded end copies nothing more.
    """
    controller = run.controller()
    state, last = query_nodes(run, connections), _recorded(run)
    if last is None:
        last = RunState(Phase.RUNNING, {})
    if state.phase is Phase.UNKNOWN and last.is_final:
        return replace(last, unreachable=state.unreachable)
    state = replace(state, controller=controller, verdict=last.verdict)
    if controller is not None:
        # The controller records the end itself, after the last byte has arrived; between two attempts, no rank runs.
        return replace(state, phase=Phase.RESTARTING) if last.phase is Phase.RESTARTING else state
    if last.is_final:
        # The record contains the cause of the end. A node only reports that its ranks were stopped, or that they run:
        # it was lost, and answers again.
        left = {**state.left, **_living(state)}
        ended = replace(last, left=left, rebooted=state.rebooted)
        if set(state.rebooted) - set(last.rebooted):
            _explain_again(run, ended)
        if not state.unreachable and ended != last:
            _write(run, ended)
        return replace(state, phase=last.phase, nodes={**state.nodes, **last.nodes}, left=left)
    if not state.unreachable and not state.is_final:
        _write(run, state)
    return state


def _write(run: RunDir, state: RunState) -> None:
    """Record a state, unless the disk here is full: that hides no answer of the nodes."""
    with suppress(OSError):
        write_state(run, state)


def _explain_again(run: RunDir, state: RunState) -> None:
    """Record the cause of a run's end anew: a node that was lost then answers now, and was restarted."""
    cause = read_cause(run)
    if cause is not None and cause.node in state.rebooted and cause.rank is None:
        with suppress(OSError):
            record_end(run, state)


def _living(state: RunState) -> dict[str, tuple[str, ...]]:
    """Return by node the ranks that run."""
    running = [
        name for name, phase in state.nodes.items() if not phase.is_final and phase is not Phase.UNKNOWN
    ]
    ranks = {
        name: [rank.rank for rank in state.ranks if rank.node == name and rank.state is not RankPhase.EXITED]
        for name in running
    }
    return {name: (rank_text(numbers),) for name, numbers in ranks.items() if numbers}


def _recorded(run: RunDir) -> RunState | None:
    """Return the recorded state; None if there is none or it is damaged: the nodes' answers are newer anyway."""
    try:
        return read_state(run)
    except UsageError:
        return None


def query_nodes(
    run: RunDir,
    connections: Connections,
    gone: Collection[str] = (),
    patience: float | None = None,
    reports: Mapping[str, NodeAnswer] = MappingProxyType({}),
) -> RunState:
    """Return the state of the present attempt as its nodes report it within `patience` seconds.

    Nodes in `gone` are not asked and count as lost. Nodes in `reports` have answered before.
    """
    record = run.read_record()
    nodes = record.cluster.nodes

    def ask(node: Node, link: Connection) -> NodeAnswer:
        where = {"run_dir": record.run_dirs[node.name], "attempt": record.attempt}
        answer = with_aftermath(link, link.ask(NodeAnswer, "state", where))
        return with_error_files(link, answer, NodeFiles(record.run_dirs[node.name], record.attempt))

    missing = [node for node in nodes if node.name not in gone and node.name not in reports]
    outcomes = within(connections, missing, ask, patience)
    outcomes += [Outcome(node, error=LinkLost(node.name, "lost")) for node in nodes if node.name in gone]
    outcomes += [
        Outcome(node, reports[node.name]) for node in nodes if node.name in reports and node.name not in gone
    ]
    order = {node.name: place for place, node in enumerate(nodes)}
    outcomes.sort(key=lambda outcome: order[outcome.node.name])
    return with_blame(run, record.attempt, combine(record, outcomes, run.last_step()))


def combine(record: RunRecord, outcomes: Sequence[Outcome[NodeAnswer]], step: Metric | None) -> RunState:
    """Return the state of the run from the answers of all nodes."""
    nodes: dict[str, Phase] = {}
    ranks: list[RankState] = []
    failures: list[RankState] = []
    unreachable: dict[str, str] = {}
    unresponsive: dict[str, str] = {}
    orphaned: list[str] = []
    rebooted: list[str] = []
    left: dict[str, tuple[str, ...]] = {}
    adopted: dict[str, int] = {}
    for outcome in outcomes:
        name = outcome.node.name
        if outcome.error is not None:
            unreachable[name] = getattr(outcome.error, "reason", str(outcome.error))
            nodes[name] = Phase.UNKNOWN
            continue
        answer = outcome.get()
        nodes[name] = answer.node.state if answer.node else Phase.UNKNOWN
        if nodes[name] is Phase.LOST or (answer.node and answer.node.supervisor_lost):
            orphaned.append(name)
        if answer.supervisor and answer.supervisor.rebooted:
            rebooted.append(name)
        if stuck := _stuck_supervisor(answer):
            unresponsive[name] = stuck.describe()
        if answer.node and answer.node.left:
            left[name] = answer.node.left
        if answer.node and answer.node.adopted:
            adopted[name] = answer.node.adopted
        here = [_rank_state(record, name, rank, answer) for rank in answer.ranks]
        ranks += here
        if answer.node and answer.node.first_failure:
            failures.append(_failed_rank(record, name, answer.node.first_failure, here, answer.clock))
    first = _first_failure(failures)
    phase = Phase.of_nodes(nodes.values())
    return RunState(
        phase,
        nodes,
        tuple(ranks),
        first,
        step,
        unreachable,
        orphaned=tuple(orphaned),
        rebooted=tuple(rebooted),
        unresponsive=unresponsive,
        left=left,
        adopted=adopted,
    )


def _first_failure(failures: Sequence[RankState]) -> RankState | None:
    """Return the earliest failure, or None.

    If a signal stopped a rank, ranks of other nodes hang because they wait for it. Their nodes may notice earlier.
    """
    stopped = any(failed.stopped for failed in failures)
    causes = [failed for failed in failures if not stopped or failed.stopped or failed.hang is None]
    return min(causes, key=lambda failed: failed.end_time, default=None)


def _stuck_supervisor(answer: NodeAnswer) -> SupervisorState | None:
    """Return the supervisor of a node if it does not respond, or did not before it was ended."""
    if answer.node and answer.node.unresponsive:
        return answer.node.unresponsive
    supervisor = answer.supervisor
    if supervisor and supervisor.alive and (supervisor.silent or 0.0) > SUPERVISOR_SILENCE:
        return supervisor
    return None


def _rank_state(record: RunRecord, node: str, rank: RankState, answer: NodeAnswer) -> RankState:
    """Return a rank's state with its device, progress and the evidence of its node."""
    rank = replace(with_clock(rank, answer), node=node, device=record.device_of(node, rank.rank))
    failure = answer.node.first_failure if answer.node else None
    if failure and failure.rank == rank.rank and (failure.hang is not None or failure.world):
        how = {name: getattr(failure, name) for name in ("hang", "silent", "stopped", "world")}
        rank = replace(rank, **how)
    pace = answer.pace.get(rank.rank)
    rank = replace(rank, step_seconds=pace) if is_number(pace) else rank
    return _with_step(rank, answer.heartbeats.get(rank.rank))


def _with_step(rank: RankState, beat: Heartbeat | None) -> RankState:
    """Add the step of a heartbeat, which plain commands do not write."""
    word = next(iter(beat.text.split()), "") if beat else ""
    if beat is None or not word.isascii() or not word.isdecimal() or len(word) > 18:
        return rank
    return replace(rank, step=int(word), step_age=beat.age)


def _failed_rank(
    record: RunRecord, node: str, failure: NodeFailure, ranks: Sequence[RankState], clock: float | None
) -> RankState:
    """Return the rank that failed first on a node: its state, but with the time and the kind of the failure.

    They differ for a rank that hung: clusterctl ended its process later.
    """
    new = RankState(failure.rank, node=node, device=record.device_of(node, failure.rank))
    rank = next((entry for entry in ranks if entry.rank == failure.rank), new)
    return replace(
        rank,
        at=None if clock is None or failure.monotonic is None else failure.monotonic - clock,
        exit_code=failure.exit_code,
        signal=failure.signal,
        ended=failure.ended,
        monotonic=failure.monotonic,
        step=rank.step if failure.step is None else failure.step,
        hang=failure.hang,
        silent=failure.silent,
        stopped=failure.stopped,
        world=failure.world,
    )


def log_in(nodes: Sequence[Node], connections: Connections) -> None:
    """Return once one node has answered; raise an error if none did.

    If one node accepts the key, the others will too; the watch handles nodes that do not answer now.
    """
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
