"""Summarise a run for `status`: phase, step, speed, ages, what happened and why; and sum up a training's metrics."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_lines import Event, Metric
from clusterctl.runs.causes.cause import Cause, read_cause
from clusterctl.runs.damage import damaged_files
from clusterctl.runs.state import RankPhase, RankState
from clusterctl.runs.watching.stall import slow
from clusterctl.text import duration, plural, rank_text
from clusterctl.wire.typed_json import encode

if TYPE_CHECKING:
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.jobs.run_lines import Events
    from clusterctl.runs.state import RunState


# Events that are shown, the newest ones; a restart writes four.
EVENTS = 12
# The exit status of a rank whose supervisor had died, so that it is unknown.
UNSEEN = "ended unseen"
# Kinds of events that repeat what another event says.
QUIET = ("planned", "collected")


@dataclass(frozen=True)
class NodeView:
    """The state of a run on one node."""

    node: str
    phase: Phase
    ranks: dict[str, int] = field(hash=False)
    """How many ranks are in each state."""
    step: int | None
    """The step that all of its ranks have finished; None for a program without heartbeats."""
    step_age: float | None
    """Seconds since the slowest rank finished that step, by the node's own clock."""
    slowest: int | None
    """The rank that is furthest behind."""
    reason: str = ""
    """Why the node, or its supervisor, does not answer."""


@dataclass(frozen=True)
class Overview:
    """The values that `status` shows; ages are in seconds."""

    run: str
    folder: str
    phase: Phase
    attempt: int
    restarts: int
    controller: int | None
    verdict: str
    age: float
    step: int | None
    steps: int | None
    loss: float | None
    tokens_per_second: float | None
    step_age: float | None
    left: float | None
    """Seconds until the last step, at the present speed."""
    checkpoint_step: int | None
    checkpoint_age: float | None
    nodes: tuple[NodeView, ...] = ()
    ranks: tuple[RankState, ...] = ()
    events: tuple[Event, ...] = ()
    damaged: tuple[str, ...] = ()
    """What could not be read in the run's folder, in words."""
    slow: dict[int, float] = field(default_factory=dict, hash=False)
    """By straggler: its own time for a step divided by the median of all ranks."""
    cause: Cause | None = None
    """Why the run failed; None if it did not."""
    left_behind: str = ""
    """What still runs, or may still run, after the end of the run, and who ends it."""
    is_copied: bool = True
    """False if the run has ended without a controller, so that its last output is still on the nodes."""
    is_newer: bool = False
    """True if a newer version of clusterctl started the run, so that this one can only show and stop it."""

    def as_json(self) -> dict[str, object]:
        ranks, cause = encode(self.ranks, sparse=True), encode(self.cause) or {}
        events = [{**event.as_json(), "text": event_text(event)} for event in self.events]
        bare = encode(replace(self, ranks=(), events=(), cause=None))
        return {**bare, "ranks": ranks, "events": events, "cause": cause}


def summarise(run: RunDir, state: RunState, now: float) -> Overview:
    """Return the overview of a run whose nodes just reported `state`."""
    lines = Counter[str]()
    progress = read_progress(run.metric_lines(lines))
    overview = make_overview(run.read_record(), state, progress, run.read_events(), now, str(run.root))
    files = damaged_files(run)
    if overview.is_newer:
        # Its own version can read it.
        files.pop(run.state, None)
    elif run.state in files and state.controller is None:
        files[run.state] += f"; write it again with: clusterctl attach {run.run_id}"
    overview = replace(overview, damaged=(*files.values(), *overview.damaged, *_unread(lines)))
    if not state.is_final:
        return overview
    # A damaged state does not say whether the output is here.
    is_copied = run.phase().is_final or run.state in files
    return replace(overview, cause=read_cause(run), left_behind=_left_behind(run, state), is_copied=is_copied)


def _unread(lines: Mapping[str, int]) -> Iterator[str]:
    """Yield in words how many lines of each file could not be read."""
    for name, count in lines.items():
        if count:
            yield f"{plural(count, 'line')} of {name} could not be read"


def _left_behind(run: RunDir, state: RunState) -> str:
    """Return in words what is left of an ended run, and who ends it; "" if nothing is."""
    record = run.read_record()
    parts = [
        f"{', '.join(names)} on {node} {'are' if len(names) > 1 else 'is'} left"
        for node, names in state.left.items()
    ]
    missing = {entry.node.name for entry in record.abandoned} & state.unreachable.keys()
    ranks = {name: record.ranks.get(name, ()) for name in sorted(missing)}
    parts += [f"{rank_text(ranks[name])} on {name} may be left" for name in ranks if ranks[name]]
    if not parts:
        return ""
    pid = run.clearer()
    who = (
        f"process {pid} here ends it when the node answers"
        if pid
        else f"end it: clusterctl stop {run.run_id}"
    )
    return f"over; {', '.join(parts)}; {who}"


def make_overview(
    record: RunRecord, state: RunState, progress: TrainProgress, history: Events, now: float, folder: str = ""
) -> Overview:
    """Return the overview of a run from its record and state; `now` is by this machine's clock."""
    last, saved = progress.last or Metric(), progress.checkpoints[-1] if progress.checkpoints else Metric()
    nodes = tuple(_node_view(name, state, record) for name in state.nodes)
    ages = [node.step_age for node in nodes if node.step_age is not None]
    return Overview(
        run=record.run,
        folder=folder,
        phase=state.phase,
        attempt=record.attempt,
        restarts=sum(event.kind == "restart" for event in history.events),
        is_newer=record.is_newer,
        controller=state.controller,
        verdict=state.verdict,
        age=max(now - record.created, 0.0),
        step=last.step,
        steps=last.steps,
        loss=last.loss,
        tokens_per_second=last.tokens_per_second,
        step_age=max(ages) if ages else _age(now, last.time),
        left=None if state.is_final else progress.left,
        checkpoint_step=saved.step,
        checkpoint_age=_age(now, saved.time),
        nodes=nodes,
        ranks=state.ranks,
        events=_shown(history.events),
        damaged=tuple(_unread({"events.jsonl": history.damaged})),
        slow=slow({rank.rank: rank.step_seconds for rank in state.ranks if rank.step_seconds}),
    )


def _age(now: float, then: float | None) -> float | None:
    """Return the seconds since a time of another clock, at least 0."""
    return None if then is None else max(now - then, 0.0)


def _node_view(name: str, state: RunState, record: RunRecord) -> NodeView:
    ranks = [rank for rank in state.ranks if rank.node == name]
    states = Counter(state_of_rank(rank) for rank in ranks)
    missing = len(record.ranks.get(name, ())) - len(ranks)
    if missing > 0:
        # A living supervisor that reports a failure has recorded each rank that it started. What the controller records
        # at a start, which is all that a login node can read, has no ranks yet.
        bare = not ranks and state.nodes[name] is Phase.RUNNING
        states["not started" if state.nodes[name] is Phase.FAILED else "running" if bare else "unknown"] += (
            missing
        )
    beating = [rank for rank in ranks if rank.step is not None]
    behind = min(beating, key=lambda rank: (rank.step or 0, -(rank.step_age or 0.0)), default=None)
    stuck = state.unresponsive.get(name)
    reason = f"its supervisor does not respond: {stuck}" if stuck and not state.nodes[name].is_final else ""
    return NodeView(
        name,
        state.nodes[name],
        dict(states),
        behind.step if behind else None,
        behind.step_age if behind else None,
        behind.rank if behind else None,
        state.unreachable.get(name, "") or reason,
    )


def state_of_rank(rank: RankState) -> str:
    """Return a rank's state in a word: running, finished, failed, stopped, hung, or unknown if its end was not seen."""
    if rank.state is not RankPhase.EXITED:
        return str(rank.state)
    # This applies however the process was ended afterwards.
    if rank.hang:
        return "hung"
    if rank.world:
        return "failed"
    if rank.exit_code is None and rank.signal is None:
        return UNSEEN
    # A supervisor stops ranks with SIGTERM: a consequence, not a cause.
    if rank.signal == signal.SIGTERM:
        return "stopped"
    return "finished" if rank.exit_code == 0 else "failed"


# ---- events


def _shown(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the newest events worth showing."""
    return tuple([event for event in events if event.kind not in QUIET][-EVENTS:])


def event_text(event: Event) -> str:
    """Return one event in words; an unknown kind is shown with its facts."""
    kind = event.kind
    facts = {name: value for name, value in event.facts.items() if name != "text"}
    texts = {
        "started": "attempt {attempt} started: {ranks} rank{s}",
        "node_ended": "{node}: {state}",
        "restart": "{why}",
        "new_port": "{why}",
        "failed": "rank {rank} on {node} failed",
        "note": "{text}",
        "straggler": "{text}",
        "interrupted": "interrupted ({by})",
        "stop_asked": "asked to stop",
        "start_failed": "did not start: {reason}",
        "collect_failed": "could not copy the results here: {reason}",
        "ended": "ended: {phase}",
        "resumed": "resumed",
    }
    ending = "" if facts.get("ranks") == 1 else "s"
    try:
        text = texts[kind].format(**{"text": "", "s": ending, **event.as_json()})
    except (KeyError, ValueError, TypeError):
        text = kind + "".join(f" {name}={value}" for name, value in facts.items())
    verdict = facts.get("verdict")
    return text + (f"; {verdict}" if verdict and kind == "ended" else "")


@dataclass
class TrainProgress:
    """The progress of a training, collected from its metrics one by one."""

    start: Metric = field(default_factory=Metric)
    last: Metric | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(step, training loss)."""
    evals: list[tuple[float, float]] = field(default_factory=list)
    """(step, validation loss)."""
    checkpoints: list[Metric] = field(default_factory=list)
    step_seconds: float | None = None
    """The time of a step, smoothed over about ten steps."""

    def feed(self, metric: Metric) -> None:
        """Add one line of metrics."""
        if metric.kind == "start":
            self.start = metric
        elif metric.kind == "step":
            self._step(metric, metric.step or 0)
        elif metric.kind == "eval":
            step, loss = metric.step or 0, metric.loss or 0.0
            self.evals = [*(point for point in self.evals if point[0] < step), (step, loss)]
        elif metric.kind == "checkpoint":
            self.checkpoints.append(metric)

    def _step(self, metric: Metric, step: int) -> None:
        self.last = metric
        # An attempt that resumed repeats steps.
        while self.losses and self.losses[-1][0] >= step:
            self.losses.pop()
        if metric.loss is not None:
            self.losses.append((step, metric.loss))
        if seconds := metric.step_seconds:
            self.step_seconds = (
                seconds if self.step_seconds is None else 0.9 * self.step_seconds + 0.1 * seconds
            )

    @property
    def left(self) -> float | None:
        """Seconds until the last step, at the present speed; None before it is known."""
        if self.last is None or self.step_seconds is None or self.last.steps is None:
            return None
        return float((self.last.steps - (self.last.step or 0)) * self.step_seconds)


def stop_cost(progress: TrainProgress, grace: float) -> str:
    """Return what a stop of a training loses if its grace is over before it has saved; "" if it has the time.

    The times of a step and of a save are those that were measured.
    """
    done, saved = progress.last, progress.checkpoints[-1] if progress.checkpoints else None
    if done is None or not done.step:
        return ""
    save = saved.facts.get("seconds") if saved else None
    needed = (progress.step_seconds or 0.0) + (save if isinstance(save, (int, float)) else 0.0)
    lost = done.step - ((saved.step or 0) if saved else 0)
    if needed <= grace or not lost:
        return ""
    since = f"since the checkpoint of step {saved.step}" if saved else "because there is no checkpoint"
    return f"{grace:g} s are too short for a step and a save ({duration(needed)}): {plural(lost, 'step')} lost {since}"


def read_progress(metrics: Iterable[Metric]) -> TrainProgress:
    """Return the progress that a series of metrics shows."""
    progress = TrainProgress()
    for metric in metrics:
        progress.feed(metric)
    return progress
