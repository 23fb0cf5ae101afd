"""A run at one look: where it is, how fast, how old its last step and checkpoint are, what happened and why.

What a training run's metrics add up to: where it is, how fast, how long it still takes.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clusterctl.runs.cause import read_cause
from clusterctl.runs.stall import slow

if TYPE_CHECKING:
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.runs.state import RunState


# The newest ones shown: a restart is told in four.
EVENTS = 12
# Without its supervisor, which would have had the exit status.
UNSEEN = "ended unseen"
# Events that say nothing that another does not say.
QUIET = ("planned", "collected")


@dataclass(frozen=True)
class NodeView:
    """A run on one node."""

    node: str
    phase: str
    ranks: dict[str, int] = field(hash=False)
    """How many ranks are in each state."""
    step: int | None
    """The step that all of its ranks have finished, by their heartbeats; None for a program without any."""
    step_age: float | None
    """Seconds since the rank that is furthest behind finished it, by the node's own clock."""
    slowest: int | None
    """That rank."""
    reason: str = ""
    """Why it can't be asked."""


@dataclass(frozen=True)
class Overview:
    """All that `status` shows; ages are in seconds."""

    run: str
    folder: str
    phase: str
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
    """Until the last step, at the speed of the last ones."""
    checkpoint_step: int | None
    checkpoint_age: float | None
    nodes: tuple[NodeView, ...] = ()
    ranks: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    events: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    slow: dict[int, float] = field(default_factory=dict, hash=False)
    """By rank that holds up the others: how many times as long as the median rank it takes for its part of a step."""
    cause: dict[str, Any] = field(default_factory=dict, hash=False)
    """Why the run failed, as the run's folder keeps it; empty while it has not."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look(run: RunDir, state: RunState, now: float) -> Overview:
    """The overview of a run's folder and of what its nodes just said."""
    progress = read_progress(run.metric_lines())
    one = make(run.read_record(), state, progress, tuple(run.event_lines()), now, str(run.root))
    return replace(one, cause=read_cause(run)) if state.is_final else one


def make(
    record: Mapping[str, Any],
    state: RunState,
    progress: TrainProgress,
    events: Sequence[Mapping[str, Any]],
    now: float,
    folder: str = "",
) -> Overview:
    """The same of values; `now` is this machine's clock."""
    last, saved = progress.last or {}, progress.checkpoints[-1] if progress.checkpoints else {}
    nodes = tuple(_node(name, state, record) for name in state.nodes)
    ages = [one.step_age for one in nodes if one.step_age is not None]
    said = _age(now, last.get("time"))
    return Overview(
        run=record["run"],
        folder=folder,
        phase=state.phase,
        attempt=record["attempt"],
        restarts=sum(one.get("event") == "restart" for one in events),
        controller=state.controller,
        verdict=state.verdict,
        age=max(now - record["created"], 0.0),
        step=last.get("step"),
        steps=last.get("steps"),
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        step_age=max(ages) if ages else said,
        left=None if state.is_final else progress.left,
        checkpoint_step=saved.get("step"),
        checkpoint_age=_age(now, saved.get("time")),
        nodes=nodes,
        ranks=state.ranks,
        events=tuple(_told(events)),
        slow=slow({one["rank"]: one["step_seconds"] for one in state.ranks if one.get("step_seconds")}),
    )


def _age(now: float, then: float | None) -> float | None:
    """Seconds since a moment by another clock: never less than none."""
    return None if then is None else max(now - then, 0.0)


def _node(name: str, state: RunState, record: Mapping[str, Any]) -> NodeView:
    ranks = [one for one in state.ranks if one["node"] == name]
    states = Counter(state_of_rank(one) for one in ranks)
    missing = len(record["ranks"].get(name, ())) - len(ranks)
    if missing > 0:
        # a supervisor that lives to call its node failed has recorded each rank that it began
        states["not started" if state.nodes[name] == "failed" else "unknown"] += missing
    beating = [one for one in ranks if one.get("step") is not None]
    behind = min(beating, key=lambda one: (one["step"], -one["step_age"]), default=None)
    return NodeView(
        name,
        state.nodes[name],
        dict(states),
        behind["step"] if behind else None,
        behind["step_age"] if behind else None,
        behind["rank"] if behind else None,
        state.unreachable.get(name, ""),
    )


def state_of_rank(rank: Mapping[str, Any]) -> str:
    """A rank's record in a word: running, finished, failed, stopped, or that nobody saw it end."""
    if rank["state"] != "exited":
        return str(rank["state"])
    # However it was ended then.
    if rank.get("hang"):
        return "hung"
    if rank.get("exit_code") is None and rank.get("signal") is None:
        return UNSEEN
    # What a supervisor asks with: a consequence, no cause.
    if rank.get("signal") == signal.SIGTERM:
        return "stopped"
    return "finished" if rank.get("exit_code") == 0 else "failed"


# ---- events


def _told(events: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for one in [one for one in events if one.get("event") not in QUIET][-EVENTS:]:
        yield {**one, "text": event_text(one)}


def event_text(event: Mapping[str, Any]) -> str:
    """One event in words; a kind that has none of its own is said with its facts."""
    kind = str(event.get("event"))
    facts = {name: value for name, value in event.items() if name not in ("time", "event", "text")}
    words = {
        "started": "attempt {attempt} started: {ranks} ranks",
        "node_ended": "{node}: {state}",
        "restart": "{why}",
        "failed": "rank {rank} on {node} failed",
        "note": "{text}",
        "straggler": "{text}",
        "interrupted": "interrupted ({by})",
        "stop_asked": "asked to stop",
        "start_failed": "did not start: {reason}",
        "collect_failed": "what was asked for did not come home: {reason}",
        "ended": "ended: {phase}",
        "resumed": "resumed",
    }
    try:
        text = words[kind].format(**{**event, "text": event.get("text", "")})
    except (KeyError, ValueError):
        text = kind + "".join(f" {name}={value}" for name, value in facts.items())
    verdict = facts.get("verdict")
    return text + (f"; {verdict}" if verdict and kind == "ended" else "")


@dataclass
class TrainProgress:
    """Fed with the trainer's metrics one by one; holds what a person wants to see of them."""

    start: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(step, training loss)."""
    evals: list[tuple[float, float]] = field(default_factory=list)
    """(step, validation loss)."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    step_seconds: float | None = None
    """A step's duration, smoothed over about ten steps."""

    def feed(self, metric: Mapping[str, Any]) -> None:
        kind = metric.get("event")
        if kind == "start":
            self.start = dict(metric)
        elif kind == "step":
            self._step(metric)
        elif kind == "eval":
            self.evals = [one for one in self.evals if one[0] < metric["step"]] + [
                (metric["step"], metric["loss"])
            ]
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
        """Seconds until the last step, at the speed of the last ones."""
        if self.last is None or self.step_seconds is None or "steps" not in self.last:
            return None
        return float((self.last["steps"] - self.last["step"]) * self.step_seconds)


def read_progress(metrics: Iterable[Mapping[str, Any]]) -> TrainProgress:
    """The progress that metrics kept in a file tell of."""
    progress = TrainProgress()
    for metric in metrics:
        progress.feed(metric)
    return progress
