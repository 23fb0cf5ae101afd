"""Summarise a run for `status`: phase, step, speed, ages, what happened and why; and sum up a training's metrics."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clusterctl.jobs.phase import Phase
from clusterctl.runs.causes.cause import Cause, read_cause
from clusterctl.runs.state import RankPhase, RankState
from clusterctl.runs.watching.stall import slow
from clusterctl.typed_json import encode

if TYPE_CHECKING:
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import Events, RunDir
    from clusterctl.runs.state import RunState


# Events that are shown, the newest ones; a restart writes four.
EVENTS = 12
# Nobody saw the exit status of such a rank: its supervisor had died.
UNSEEN = "ended unseen"
# Kinds of events that repeat what another event says.
QUIET = ("planned", "collected")


@dataclass(frozen=True)
class NodeView:
    """A run on one node."""

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
    """All that `status` shows; ages are in seconds."""

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
    events: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    damaged_events: int = 0
    """Lines of the history that could not be read."""
    slow: dict[int, float] = field(default_factory=dict, hash=False)
    """By straggler, how many times as long as the median rank it takes for its part of a step."""
    cause: Cause | None = None
    """Why the run failed; None if it did not."""

    def as_json(self) -> dict[str, Any]:
        ranks, cause = encode(self.ranks, sparse=True), encode(self.cause) or {}
        return {**encode(replace(self, ranks=(), cause=None)), "ranks": ranks, "cause": cause}


def summarise(run: RunDir, state: RunState, now: float) -> Overview:
    """Return the overview of a run whose nodes just reported `state`."""
    progress = read_progress(run.metric_lines())
    overview = make_overview(run.read_record(), state, progress, run.read_events(), now, str(run.root))
    return replace(overview, cause=read_cause(run)) if state.is_final else overview


def make_overview(
    record: RunRecord, state: RunState, progress: TrainProgress, history: Events, now: float, folder: str = ""
) -> Overview:
    """Return the overview made of values; `now` is by this machine's clock."""
    last, saved = progress.last or {}, progress.checkpoints[-1] if progress.checkpoints else {}
    nodes = tuple(_node_view(name, state, record) for name in state.nodes)
    ages = [node.step_age for node in nodes if node.step_age is not None]
    return Overview(
        run=record.run,
        folder=folder,
        phase=state.phase,
        attempt=record.attempt,
        restarts=sum(event["event"] == "restart" for event in history.events),
        controller=state.controller,
        verdict=state.verdict,
        age=max(now - record.created, 0.0),
        step=last.get("step"),
        steps=last.get("steps"),
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        step_age=max(ages) if ages else _age(now, last.get("time")),
        left=None if state.is_final else progress.left,
        checkpoint_step=saved.get("step"),
        checkpoint_age=_age(now, saved.get("time")),
        nodes=nodes,
        ranks=state.ranks,
        events=tuple(_shown(history.events)),
        damaged_events=history.damaged,
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
        # A living supervisor that reports a failure has recorded each rank that it started.
        states["not started" if state.nodes[name] is Phase.FAILED else "unknown"] += missing
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
    """Return a rank's state in a word: running, finished, failed, stopped, hung, or that nobody saw its end."""
    if rank.state is not RankPhase.EXITED:
        return str(rank.state)
    # However it was ended afterwards.
    if rank.hang:
        return "hung"
    if rank.exit_code is None and rank.signal is None:
        return UNSEEN
    # A supervisor stops ranks with SIGTERM: a consequence, not a cause.
    if rank.signal == signal.SIGTERM:
        return "stopped"
    return "finished" if rank.exit_code == 0 else "failed"


# ---- events


def _shown(events: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield the newest events worth showing, each with its text."""
    for event in [event for event in events if event["event"] not in QUIET][-EVENTS:]:
        yield {**event, "text": event_text(event)}


def event_text(event: Mapping[str, Any]) -> str:
    """Return one event in words; an unknown kind is shown with its facts."""
    kind = str(event.get("event"))
    facts = {name: value for name, value in event.items() if name not in ("time", "event", "text")}
    texts = {
        "started": "attempt {attempt} started: {ranks} ranks",
        "node_ended": "{node}: {state}",
        "restart": "{why}",
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
    try:
        text = texts[kind].format(**{**event, "text": event.get("text", "")})
    except (KeyError, ValueError, TypeError):
        text = kind + "".join(f" {name}={value}" for name, value in facts.items())
    verdict = facts.get("verdict")
    return text + (f"; {verdict}" if verdict and kind == "ended" else "")


@dataclass
class TrainProgress:
    """The progress of a training, collected from its metrics one by one."""

    start: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(step, training loss)."""
    evals: list[tuple[float, float]] = field(default_factory=list)
    """(step, validation loss)."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    step_seconds: float | None = None
    """The time of a step, smoothed over about ten steps."""

    def feed(self, metric: Mapping[str, Any]) -> None:
        kind = metric.get("event")
        if kind == "start":
            self.start = dict(metric)
        elif kind == "step":
            self._step(metric)
        elif kind == "eval":
            earlier = [point for point in self.evals if point[0] < metric["step"]]
            self.evals = [*earlier, (metric["step"], metric["loss"])]
        elif kind == "checkpoint":
            self.checkpoints.append(dict(metric))

    def _step(self, metric: Mapping[str, Any]) -> None:
        self.last = dict(metric)
        # An attempt that resumed repeats steps.
        while self.losses and self.losses[-1][0] >= metric["step"]:
            self.losses.pop()
        if "loss" in metric:
            self.losses.append((metric["step"], metric["loss"]))
        seconds = metric.get("step_seconds")
        if seconds:
            self.step_seconds = (
                seconds if self.step_seconds is None else 0.9 * self.step_seconds + 0.1 * seconds
            )

    @property
    def left(self) -> float | None:
        """Seconds until the last step, at the present speed; None before it is known."""
        if self.last is None or self.step_seconds is None or "steps" not in self.last:
            return None
        return float((self.last["steps"] - self.last["step"]) * self.step_seconds)


def read_progress(metrics: Iterable[Mapping[str, Any]]) -> TrainProgress:
    """Return the progress that a series of metrics shows."""
    progress = TrainProgress()
    for metric in metrics:
        progress.feed(metric)
    return progress
