"""Summarise a run from its local files: steps, time, losses, speed, memory, goodput, restarts, checkpoint."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterctl.errors import UsageError
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import RunRecord
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Events, Metric
from clusterctl.report.curve import means, quantile
from clusterctl.report.evaluations import read_evaluations
from clusterctl.report.history import History, Steps, read_history
from clusterctl.runs.causes.cause import Cause
from clusterctl.runs.finish import superseded_steps
from clusterctl.runs.state import read_state
from clusterctl.text import plural
from clusterctl.wire.results import Evaluation
from clusterctl.wire.typed_json import BadValue, decode, encode

# Values of the loss curve that a summary keeps.
CURVE = 120


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, from the start of its ranks to their end."""

    number: int
    began: float
    """Seconds since the epoch."""
    ended: float | None = None
    ranks: int = 0
    nodes: tuple[str, ...] = ()
    phase: str = ""
    """How it ended; "running" while it has not."""
    cause: str = ""
    """The root cause, if it failed."""
    from_step: int | None = None
    """How many steps were finished when it began; None for a program without steps."""
    to_step: int | None = None

    @property
    def seconds(self) -> float:
        return max((self.ended or time.time()) - self.began, 0.0)


@dataclass(frozen=True)
class SavedStep:
    """The newest checkpoint of a run."""

    step: int
    bytes: int | None = None
    path: str = ""
    """Where it is on the node of rank 0."""
    here: str = ""
    """Where its copy is on this machine; "" if there is none."""


@dataclass(frozen=True)
class Speed:
    """The speed of a training in its median step."""

    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    slowest_seconds: float | None = None
    """The 99th percentile of the steps."""
    tflops: float | None = None
    """Per device, by the convention `model`."""
    of_peak: float | None = None


@dataclass(frozen=True)
class RunSummary:
    """The summary of a run, which all views show."""

    run: str
    folder: str
    name: str
    phase: Phase
    ranks: int
    nodes: int
    created: float
    seconds: float
    """From the launch to the end, without the time between an end and a `resume`."""
    trains: bool = False
    """Whether it has steps: a training, or a program whose steps were found in its output."""
    program: bool = False
    """Whether it is a program of the user's own; where that saves checkpoints is not known."""
    verdict: str = ""
    cause: str = ""
    steps_done: int | None = None
    steps: int | None = None
    tokens: int | None = None
    parameters: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    first_eval: float | None = None
    last_eval: float | None = None
    best_eval: float | None = None
    best_eval_step: int | None = None
    last_accuracy: float | None = None
    """The fraction of right answers in the last evaluation of a task."""
    best_accuracy: float | None = None
    curve: tuple[float, ...] = ()
    """The training loss in at most CURVE means."""
    speed: Speed = Speed()
    memory_bytes: int | None = None
    """The peak memory of the rank that needs most."""
    planned_bytes: int | None = None
    goodput: float | None = None
    """The fraction of `seconds` that was spent in steps that count."""
    device_hours: float = 0.0
    attempts: tuple[Attempt, ...] = ()
    restarts: int = 0
    checkpoint: SavedStep | None = None
    repeated: int = 0
    """Number of steps that were repeated after a restart."""
    work: str = ""
    """For a program: the folder on its nodes in which it started."""
    evaluations: tuple[Evaluation, ...] = ()
    """Results of `clusterctl eval` and of tasks that the training evaluated."""
    damaged_evaluations: tuple[str, ...] = ()
    """Files without a valid result, with the fault of each."""

    @property
    def is_final(self) -> bool:
        return self.phase.is_final

    def as_json(self) -> dict[str, object]:
        result = encode(self)
        assert isinstance(result, dict)
        return result


@dataclass(frozen=True)
class Sources:
    """The content of a run's files, from which its summary is made."""

    record: RunRecord
    events: Events
    history: History
    phase: Phase
    verdict: str = ""


def summarise(run: RunDir, *, now: float | None = None) -> RunSummary:
    """Return the summary of a run from its local files; no node is contacted."""
    return summary_of(run, read_sources(run), now=now)


def read_sources(run: RunDir, history: History | None = None) -> Sources:
    """Return the content of a run's files; `history` are its metrics if they were read already."""
    try:
        state = read_state(run)
    except UsageError:
        state = None
    verdict = state.verdict if state else ""
    return Sources(run.read_record(), run.read_events(), history or read_history(run), run.phase(), verdict)


def summary_of(run: RunDir, sources: Sources, *, now: float | None = None) -> RunSummary:
    """Return the summary of a run from the content of its files."""
    record, history = sources.record, sources.history
    now = time.time() if now is None else now
    attempts = read_attempts(run, sources)
    seconds = _active_seconds(record, sources.events, now)
    evaluated = read_evaluations(run, history.evaluations)
    summary = RunSummary(
        run=record.run,
        folder=str(run.root),
        name=record.job.name,
        phase=sources.phase,
        ranks=record.world_size,
        nodes=len(record.ranks),
        created=record.created,
        seconds=seconds,
        trains=record.job.train is not None or bool(len(history.steps)),
        program=record.job.train is None,
        work=next(iter(record.work_dirs.values()), ""),
        verdict=sources.verdict,
        cause=next((attempt.cause for attempt in reversed(attempts) if attempt.cause), "")
        if sources.phase in (Phase.FAILED, Phase.LOST)
        else "",
        attempts=attempts,
        restarts=sum(event.kind == "restart" for event in sources.events.events),
        evaluations=evaluated.results,
        damaged_evaluations=evaluated.damaged,
        device_hours=sum(attempt.seconds * attempt.ranks for attempt in attempts) / 3600,
    )
    return _with_training(summary, run, history) if len(history.steps) else summary


def _with_training(summary: RunSummary, run: RunDir, history: History) -> RunSummary:
    steps, indexes = history.steps, history.steps.kept()
    losses = [loss for index in indexes if math.isfinite(loss := steps["loss"][index])]
    evals = history.kept_evals()
    best = min(evals, key=lambda point: point[1], default=None)
    right = [line.facts["accuracy"] for line in history.evals if _is_fraction(line.facts.get("accuracy"))]
    peak, planned = _memory(history)
    spent = _time_in_steps(steps, indexes)
    start = history.starts[-1] if history.starts else Metric()
    return replace(
        summary,
        steps_done=int(steps.step[-1]),
        steps=history.last.steps or start.steps,
        tokens=_whole(history.last.facts.get("tokens")),
        parameters=start.parameters,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        first_eval=evals[0][1] if evals else None,
        last_eval=evals[-1][1] if evals else None,
        best_eval=best[1] if best else None,
        best_eval_step=best[0] if best else None,
        last_accuracy=right[-1] if right else None,
        best_accuracy=max(right, default=None),
        curve=tuple(means(losses, CURVE)),
        speed=_speed(steps, indexes, history.last),
        memory_bytes=peak,
        planned_bytes=planned,
        goodput=min(spent / summary.seconds, 1.0) if summary.seconds > 0 and spent else None,
        checkpoint=_newest_checkpoint(run, history),
        repeated=len(steps) - len(indexes),
    )


def _time_in_steps(steps: Steps, indexes: Sequence[int]) -> float:
    """Return the seconds of the steps that count; a program may report every tenth step only."""
    total, before = 0.0, -1
    for index in indexes:
        begins = before < 0 or steps.start[index] != steps.start[before]
        steps_since = 1 if begins else steps.step[index] - steps.step[before]
        if math.isfinite(seconds := steps["step_seconds"][index]):
            total += seconds * steps_since
        before = index
    return total


def _speed(steps: Steps, indexes: Sequence[int], last: Metric) -> Speed:
    """Return the speed of the median step; the first step of each start is left out, for it includes warm-up."""
    first = {index for index in indexes if not index or steps.start[index] != steps.start[index - 1]}
    later = [index for index in indexes if index not in first] or list(indexes)
    times, rates = _sorted(steps["step_seconds"], later), _sorted(steps["tokens_per_second"], later)
    rate = quantile(rates, 0.5) if rates else None
    typical = quantile(times, 0.5) if times else None
    samples = _sorted(steps["samples_per_second"], later)
    in_step, given = last.facts.get("samples"), last.facts.get("samples_per_second")
    if samples:
        given = quantile(samples, 0.5)
    elif isinstance(in_step, int) and typical:
        given = in_step / typical
    tflops, share, at = (
        _model(last.facts.get("tflops")),
        _model(last.facts.get("of_peak")),
        last.tokens_per_second,
    )
    # Both are proportional to the rate.
    factor = rate / at if rate and at else None
    return Speed(
        tokens_per_second=rate,
        samples_per_second=float(given) if isinstance(given, (int, float)) else None,
        step_seconds=typical,
        slowest_seconds=quantile(times, 0.99) if times else None,
        tflops=tflops * factor if tflops is not None and factor else None,
        of_peak=share * factor if share is not None and factor else None,
    )


def _is_fraction(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _sorted(column: array[float], indexes: Sequence[int]) -> list[float]:
    return sorted(value for index in indexes if math.isfinite(value := column[index]))


def _model(value: Any) -> float | None:
    number = value.get("model") if isinstance(value, dict) else None
    return float(number) if isinstance(number, (int, float)) else None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) else None


def _memory(history: History) -> tuple[int | None, int | None]:
    """Return the highest measured and planned bytes of any rank."""
    measured = [count for line in history.memory for count in _numbers(line.facts.get("bytes"))]
    planned = [count for line in history.memory for count in _numbers(line.facts.get("planned"))]
    return max(measured, default=None), max(planned, default=None)


def _numbers(value: Any) -> list[int]:
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []


def _newest_checkpoint(run: RunDir, history: History) -> SavedStep | None:
    passed_over = superseded_steps(_in_order(history))
    saved = [line for line in history.kept_checkpoints() if line.step not in passed_over]
    if not saved:
        return None
    newest = saved[-1]
    path = str(newest.facts.get("path") or "")
    here = run.checkpoints / path.rpartition("/")[2] if path else None
    return SavedStep(
        newest.step or 0,
        _whole(newest.facts.get("bytes")),
        path,
        str(here) if here and (here / "manifest.json").is_file() else "",
    )


def _in_order(history: History) -> list[Metric]:
    """Return starts and checkpoints in the order of their times."""
    return sorted((*history.starts, *history.checkpoints), key=lambda line: line.time or 0.0)


def _active_seconds(record: RunRecord, events: Events, now: float) -> float:
    """Return how long the run was active: from its launch or a `resume` to its end, each time."""
    total, since, began = 0.0, record.created, True
    for event in events.events:
        if event.kind == "ended" and began:
            total, began = total + max(event.time - since, 0.0), False
        elif event.kind == "resumed" and not began:
            since, began = event.time, True
    return total + (max(now - since, 0.0) if began else 0.0)


def read_attempts(run: RunDir, sources: Sources) -> tuple[Attempt, ...]:
    """Return the attempts of a run, oldest first."""
    found: list[Attempt] = []
    last_end = 0.0
    for event in sources.events.events:
        kind, at, facts = event.kind, event.time, event.facts
        if kind == "started" and isinstance(facts.get("attempt"), int):
            nodes = tuple(map(str, facts.get("nodes") or ()))
            found.append(Attempt(facts["attempt"], at, None, int(facts.get("ranks") or 0), nodes))
            last_end = 0.0
        elif kind in ("node_ended", "failed"):
            last_end = at
        elif kind in ("restart", "new_port", "ended") and found and found[-1].ended is None:
            found[-1] = replace(found[-1], ended=last_end or at)
    if found and found[-1].ended is None and sources.phase.is_final:
        # Its controller died before it could record the end.
        found[-1] = replace(found[-1], ended=last_end or _last_time(sources))
    whole = [_with_end(run, attempt, sources.phase) for attempt in found]
    return tuple(_with_steps(attempt, sources.history) for attempt in whole)


def _last_time(sources: Sources) -> float:
    times = [event.time for event in sources.events.events[-1:]]
    metric = sources.history.last.time
    return max(times if metric is None else [*times, metric], default=0.0)


def _with_end(run: RunDir, attempt: Attempt, phase: Phase) -> Attempt:
    if attempt.ended is None:
        return replace(attempt, phase=str(phase))
    cause = _read_cause(run, attempt.number)
    try:
        state = read_state(run, run.attempt_state(attempt.number))
    except UsageError:
        state = None
    ended = str(state.phase) if state else "failed" if cause else str(phase)
    return replace(attempt, phase=ended, cause=cause)


def _read_cause(run: RunDir, attempt: int) -> str:
    path = run.attempt_cause(attempt)
    try:
        return decode(Cause, run.read_json(path)).title if path.exists() else ""
    except (BadValue, UsageError):
        return ""


def _with_steps(attempt: Attempt, history: History) -> Attempt:
    """Return the attempt with the steps at its beginning and end."""
    number = next(
        (index for index, start in enumerate(history.starts) if start.facts.get("attempt") == attempt.number),
        None,
    )
    if number is None:
        return attempt
    begin = history.starts[number].step or 0
    mine = [index for index, start in enumerate(history.steps.start) if start == number]
    return replace(attempt, from_step=begin, to_step=history.steps.step[mine[-1]] if mine else begin)


# Ranks whose logs are suggested together.
MOST_RANKS = 64


def resume_text(summary: RunSummary) -> str:
    """Return a description of what `clusterctl resume` would do with an ended training; "" if nothing can be
    resumed.
    """
    if not summary.trains or summary.phase not in (Phase.STOPPED, Phase.FAILED, Phase.LOST):
        return ""
    if summary.program:
        return "starts the command again; whether it continues from a checkpoint of its own is up to it"
    if summary.steps_done is None:
        return "starts the training from its beginning: no step was finished"
    if summary.checkpoint is None:
        return f"starts again from step 1: no checkpoint was saved; {plural(summary.steps_done, 'step')} lost"
    step = summary.checkpoint.step
    lost = max(summary.steps_done - step, 0)
    repeated = f"; {plural(lost, 'step')} repeated" if lost else "; nothing is repeated"
    return f"continues after step {step}{repeated}"


def nothing_left(summary: RunSummary) -> str:
    """Return a text saying that a finished training has no steps left; "" if steps are left."""
    if not summary.trains or summary.phase is not Phase.FINISHED or not summary.steps_done:
        return ""
    if summary.steps and summary.steps_done < summary.steps:
        return ""
    return f"nothing is left to do: all {summary.steps_done:,} steps of {summary.run} are done"


def next_commands(summary: RunSummary) -> list[str]:
    """Return commands to continue with, the most useful first."""
    run = summary.run
    if not summary.is_final:
        return [f"clusterctl attach {run}", f"clusterctl status {run}", f"clusterctl stop {run}"]
    commands = []
    if summary.phase is not Phase.FINISHED:
        commands += [f"clusterctl resume {run}", f"clusterctl logs show {run} --errors"]
    if summary.checkpoint and summary.checkpoint.here:
        commands.append(f"clusterctl generate {run} --prompt '...'")
    if summary.trains and summary.steps_done:
        commands.append(f"clusterctl report {run} -o report.html")
    else:
        every = f" --rank 0-{summary.ranks - 1}" if 1 < summary.ranks <= MOST_RANKS else ""
        commands.append(f"clusterctl logs show {run}{every}")
    return commands
