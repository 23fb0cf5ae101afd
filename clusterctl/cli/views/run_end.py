"""Show the summary of a run: steps, losses, speed, memory, restarts, checkpoint, and the next commands."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from clusterctl.report.curve import sparkline
from clusterctl.report.evaluations import figures_text
from clusterctl.report.summary import Attempt, RunSummary, Speed, next_commands, resume_text
from clusterctl.text import count, escape_controls, plural, short_time, size

# Attempts that are listed, the newest ones.
ATTEMPTS = 5
# Columns of the loss curve.
WIDTH = 40
# Results of evaluations that are listed, the newest ones.
EVALUATIONS = 8


def end_block(summary: RunSummary, *, unicode: bool = True, commands: bool = True) -> Table:
    """Return the summary of a run as a table without frames."""
    drawn = Table.grid(padding=(0, 1, 0, 0))
    drawn.add_column(min_width=10, no_wrap=True)
    drawn.add_column(overflow="fold")
    rows = [*_facts(summary, unicode=unicode)]
    if text := resume_text(summary):
        rows.append(("resume", text))
    if commands:
        rows += [("next" if not number else "", line) for number, line in enumerate(next_commands(summary))]
    for name, text in rows:
        drawn.add_row(name, Text(escape_controls(text)))
    return drawn


def _facts(summary: RunSummary, *, unicode: bool) -> Iterator[tuple[str, str]]:
    who = f"{plural(summary.ranks, 'rank')}, {plural(summary.nodes, 'node')}"
    # By the clock of this machine, which can be set back meanwhile.
    spent = short_time(summary.seconds) if summary.seconds > 0 else "an unknown time (the clock was set back)"
    if summary.steps_done is None:
        yield "time", f"{spent} on {who}"
    else:
        of = f" of {summary.steps:,}" if summary.steps and summary.steps != summary.steps_done else ""
        tokens = f", {count(summary.tokens)} tokens" if summary.tokens else ""
        yield "steps", f"{summary.steps_done:,}{of} in {spent} on {who}{tokens}"
    if summary.first_loss is not None and summary.last_loss is not None:
        line = sparkline(summary.curve, WIDTH, unicode=unicode)
        yield "loss", f"{number(summary.first_loss)} -> {number(summary.last_loss)}" + (line and f"  {line}")
    if summary.first_eval is not None and summary.last_eval is not None:
        yield "validation", _validation(summary)
    if summary.last_accuracy is not None and summary.best_accuracy is not None:
        yield "accuracy", f"{summary.last_accuracy:.2%}; best {summary.best_accuracy:.2%}"
    if text := speed_text(summary.speed):
        yield "speed", text
    if summary.memory_bytes is not None:
        planned = f" (planned {size(summary.planned_bytes)})" if summary.planned_bytes else ""
        yield "memory", f"at most {size(summary.memory_bytes)} per device{planned}"
    if summary.goodput is not None:
        yield "goodput", f"{summary.goodput:.0%} of the time in steps that count"
    yield from _restarts(summary)
    for result in summary.evaluations[-EVALUATIONS:]:
        yield result.task, f"{figures_text(result)} (step {result.step:,}, {result.convention})"
    for damaged in summary.damaged_evaluations:
        yield "evaluation", f"damaged: {escape_controls(damaged)}"
    if summary.work and summary.is_final:
        nodes = "the node" if summary.nodes == 1 else "each node"
        yield (
            "folder",
            f"{summary.work} on {nodes}; fetch what was written there: clusterctl pull {summary.run} DIR",
        )
    if summary.checkpoint:
        yield "checkpoint", checkpoint_text(summary)


def _validation(summary: RunSummary) -> str:
    assert summary.last_eval is not None and summary.first_eval is not None
    perplexity = f" (perplexity {number(math.exp(summary.last_eval))})" if summary.last_eval < 50 else ""
    text = f"{number(summary.first_eval)} -> {number(summary.last_eval)}{perplexity}"
    if summary.best_eval is not None and summary.best_eval < summary.last_eval:
        text += f"; lowest {number(summary.best_eval)} at step {summary.best_eval_step:,}"
    return text


def speed_text(speed: Speed) -> str:
    """Return the speed of the median step; "" if it is unknown."""
    parts = []
    if speed.tokens_per_second:
        parts.append(f"{count(speed.tokens_per_second)} tokens/s")
    if speed.samples_per_second:
        parts.append(f"{number(speed.samples_per_second)} samples/s")
    if speed.step_seconds:
        parts.append(f"{milliseconds(speed.step_seconds)} per step")
    if speed.tflops:
        share = f" ({speed.of_peak:.0%} of its peak)" if speed.of_peak else ""
        parts.append(f"{number(speed.tflops)} TFLOP/s per device{share}")
    return ", ".join(parts)


def _restarts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    failed = [attempt for attempt in summary.attempts if attempt.cause]
    if summary.restarts or len(summary.attempts) > 1:
        again = f"; {plural(summary.repeated, 'step')} repeated" if summary.repeated else ""
        attempts = plural(len(summary.attempts), "attempt")
        yield "attempts", f"{attempts}, {plural(summary.restarts, 'automatic restart')}{again}"
    shown = failed[-ATTEMPTS:] if len(summary.attempts) > 1 else ()
    if len(failed) > len(shown) > 0:
        yield "", f"({len(failed) - len(shown)} earlier failures are not shown)"
    for attempt in shown:
        yield "", attempt_text(attempt)


def attempt_text(attempt: Attempt) -> str:
    """Return how a failed attempt ended."""
    when = time.strftime("%H:%M:%S", time.localtime(attempt.ended or attempt.began))
    at = f" after step {attempt.to_step:,}" if attempt.to_step is not None else ""
    return f"{when}  attempt {attempt.number}{at}: {attempt.cause}"


def checkpoint_text(summary: RunSummary) -> str:
    """Return which checkpoint is the newest, and where it is."""
    saved = summary.checkpoint
    assert saved is not None
    bytes_ = f" ({size(saved.bytes)})" if saved.bytes else ""
    where = near_path(saved.here) if saved.here else f"on the nodes: {saved.path}"
    return f"step {saved.step:,}{bytes_}, {where}"


def near_path(path: str) -> str:
    """Return a path relative to the current folder if it lies in it."""
    inside = os.path.relpath(path)
    return path if inside.startswith("..") else inside


def number(value: float) -> str:
    """Return a number with four significant digits, without an exponent if possible."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:.{digits}f}"
    return f"{value:.3e}"


def milliseconds(seconds: float) -> str:
    """Return a duration of a step: `120 ms`, `1.53 s`."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
