"""Write a run as one HTML file without external resources, in which log text cannot run as a script."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl import __version__
from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Metric
from clusterctl.logs.store import last_lines
from clusterctl.report import charts
from clusterctl.report.charts import Bar, Line, Span
from clusterctl.report.config import differences, flat_config
from clusterctl.report.evaluations import figures_text
from clusterctl.report.history import History
from clusterctl.report.summary import RunSummary, Sources, read_sources, summary_of
from clusterctl.report.tables import details, facts, newest, pre, safe, table
from clusterctl.runs.overview import event_text
from clusterctl.runs.state import read_state
from clusterctl.runs.watching.stall import slow
from clusterctl.text import count, duration, plural, size

FOLDER = Path(__file__).parent
# Rows of each table, and lines of each log; a page stays below 500 kB.
ROWS, LINES, LOGS = 200, 40, 6
# Characters of a rank table.
TABLE_TEXT = 20_000
PHASES = {"finished": "good", "failed": "bad", "lost": "bad", "stopped": "warn"}


@dataclass(frozen=True)
class Subject:
    """A run with all values that its page shows."""

    run: RunDir
    sources: Sources
    summary: RunSummary

    @classmethod
    def of(cls, run: RunDir) -> Subject:
        sources = read_sources(run)
        return cls(run, sources, summary_of(run, sources))

    @property
    def history(self) -> History:
        return self.sources.history

    def config(self) -> dict[str, str]:
        return flat_config(self.sources.record, self.history)


def page(run: RunDir, other: RunDir | None = None) -> str:
    """Return the page of a run; `other` is a run whose configuration is compared."""
    subject = Subject.of(run)
    parts = [
        _head(subject),
        _section("Curves", curves(subject)),
        _section("Attempts", _attempts(subject)),
        _section("Nodes and ranks", _nodes(subject)),
        _section("Checkpoints and evaluations", _results(subject)),
        _section("Configuration", _config(subject, other)),
        _section("Versions", _versions(subject)),
        _section("What happened", _events(subject)),
        _section("Logs", _logs(subject)),
    ]
    return document(f"{subject.summary.run}: report", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a complete HTML file; its Content-Security-Policy allows only our own style and script."""
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    written = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{style}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer><p>Written by clusterctl {__version__} on {written}.</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(title: str, body: str) -> str:
    return f"<section><h2>{safe(title)}</h2>{body}</section>" if body else ""


def _head(subject: Subject) -> str:
    summary = subject.summary
    colour = PHASES.get(str(summary.phase), "dim")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.created))
    text = (
        f'<h1>{safe(summary.run)}<span class="phase {colour}">{safe(summary.phase)}</span></h1>'
        f'<p class="dim">started {began}, {plural(summary.ranks, "rank")} on {plural(summary.nodes, "node")}</p>'
    )
    if summary.cause:
        text += f'<div class="cause"><b>Root cause:</b> {safe(summary.cause)}</div>'
    if summary.verdict:
        text += f'<p class="warn">{safe(summary.verdict)}</p>'
    tiles = [
        f'<div class="tile"><b>{safe(value)}</b><span>{safe(name)}</span></div>'
        for name, value in _tiles(summary)
    ]
    return f'<header>{text}<div class="tiles">{"".join(tiles)}</div></header>'


def _tiles(summary: RunSummary) -> Iterable[tuple[str, str]]:
    yield "time", duration(summary.seconds)
    if summary.steps_done is not None:
        yield "steps", f"{summary.steps_done:,}" + (f" / {summary.steps:,}" if summary.steps else "")
    if summary.first_loss is not None and summary.last_loss is not None:
        yield "training loss, first and last", f"{summary.first_loss:.4g} → {summary.last_loss:.4g}"
    if summary.last_eval is not None:
        yield "validation loss", f"{summary.last_eval:.4g}"
    if summary.best_eval is not None:
        yield "lowest validation loss", f"{summary.best_eval:.4g} at {summary.best_eval_step:,}"
    if summary.last_accuracy is not None and summary.best_accuracy is not None:
        yield (
            "accuracy of the task, last / best",
            f"{summary.last_accuracy:.2%} / {summary.best_accuracy:.2%}",
        )
    if summary.tokens:
        yield "tokens", count(summary.tokens)
    if summary.parameters:
        yield "parameters", count(summary.parameters)
    speed = summary.speed
    if speed.tokens_per_second:
        yield "tokens per second (median step)", count(speed.tokens_per_second)
    if speed.samples_per_second:
        yield "samples per second (median step)", f"{speed.samples_per_second:.4g}"
    if speed.step_seconds and speed.slowest_seconds:
        yield "seconds per step: median, 99 %", f"{speed.step_seconds:.3g}, {speed.slowest_seconds:.3g}"
    if speed.tflops:
        share = f" ({speed.of_peak:.0%})" if speed.of_peak else ""
        yield "TFLOP/s per device (of its peak)", f"{speed.tflops:.3g}{share}"
    if summary.memory_bytes is not None:
        planned = f" / {size(summary.planned_bytes)}" if summary.planned_bytes else ""
        yield "peak memory, measured / planned", f"{size(summary.memory_bytes)}{planned}"
    if summary.goodput is not None:
        yield "goodput: time in steps that count", f"{summary.goodput:.0%}"
    yield "device-hours", f"{summary.device_hours:.3g}"
    yield "automatic restarts", str(summary.restarts)


def curves(subject: Subject) -> str:
    """Return the charts of a training; "" without steps."""
    history, steps = subject.history, subject.history.steps
    if not len(steps):
        return ""
    marks = sorted({start.step or 0 for start in history.starts[1:]})
    times = [steps["step_seconds"][index] for index in steps.kept()]
    drawn = [
        charts.line_chart("Loss", [*_by_attempt(subject, "loss"), _validation(history)], marks, wide=True),
        charts.line_chart(
            "Tokens per second", _by_attempt(subject, "tokens_per_second"), marks, from_zero=True
        ),
        charts.line_chart(
            "Samples per second", _by_attempt(subject, "samples_per_second"), marks, from_zero=True
        ),
        charts.line_chart("Seconds per step", _step_times(subject), marks, from_zero=True),
        charts.line_chart("Learning rate", _by_attempt(subject, "lr"), marks, from_zero=True),
        charts.line_chart("Gradient norm", _by_attempt(subject, "grad_norm"), marks),
        charts.histogram("Steps by their time", [value * 1000 for value in times], "ms"),
        charts.bars("Own seconds for a step, by rank (slowest)", _stragglers(subject)),
        charts.bars("Peak memory by rank; the wide bar is the plan", _memory(history)),
    ]
    return f'<div class="charts">{"".join(drawn)}</div>'


def _by_attempt(subject: Subject, column: str) -> list[Line]:
    """Return a column as lines: of each start, first those steps that were repeated later."""
    steps = subject.history.steps
    indexes = set(steps.kept()) if len(subject.history.starts) > 1 else None
    values, name = steps[column], column.replace("_", " ")
    lines: list[Line] = []
    begin = 0
    for index in range(1, len(steps) + 1):
        if index < len(steps) and steps.start[index] == steps.start[begin]:
            continue
        part = range(begin, index)
        lost = [
            (float(steps.step[at]), values[at]) for at in part if indexes is not None and at not in indexes
        ]
        counted = [(float(steps.step[at]), values[at]) for at in part if indexes is None or at in indexes]
        lines += [Line(f"{name}, repeated later", lost, 5, faint=True)] if lost else []
        lines += [Line(name, counted)] if counted else []
        begin = index
    return lines


def _validation(history: History) -> Line:
    return Line("validation loss", [(float(step), loss) for step, loss in history.kept_evals()], 1, dots=True)


def _step_times(subject: Subject) -> list[Line]:
    steps = subject.history.steps
    indexes = steps.kept()
    names = (("step_seconds", "a step", 0), ("own_seconds", "rank 0 without waiting", 1))
    return [
        Line(name, [(float(steps.step[at]), steps[column][at]) for at in indexes], colour)
        for column, name, colour in names
        if any(value > 0 for value in steps[column])
    ]


def _stragglers(subject: Subject) -> list[Bar]:
    """Return the ranks' own time for a step: the slowest ones, and the median."""
    try:
        state = read_state(subject.run)
    except UsageError:
        return []
    paced = [rank for rank in (state.ranks if state else ()) if rank.step_seconds]
    late = slow({rank.rank: rank.step_seconds or 0.0 for rank in paced})
    ordered = sorted(paced, key=lambda rank: -(rank.step_seconds or 0.0))[:16]
    return [
        Bar(
            f"rank {rank.rank} on {rank.node}",
            rank.step_seconds or 0.0,
            f"{rank.step_seconds:.3g} s" + (f", {late[rank.rank]:.1f}x" if rank.rank in late else ""),
            colour="fbad" if rank.rank in late else "f0",
        )
        for rank in ordered
    ]


def _memory(history: History) -> list[Bar]:
    facts = history.memory[-1].facts if history.memory else {}
    measured, planned = facts.get("bytes") or [], facts.get("planned") or []
    if not isinstance(measured, list) or not all(isinstance(value, int) for value in measured):
        return []
    expected = planned if isinstance(planned, list) and len(planned) == len(measured) else [0] * len(measured)
    order = sorted(range(len(measured)), key=lambda rank: -measured[rank])[:16]
    return [
        Bar(f"rank {rank}", measured[rank], size(measured[rank]), expected[rank]) for rank in sorted(order)
    ]


def _attempts(subject: Subject) -> str:
    attempts = subject.summary.attempts
    if not attempts:
        return ""
    spans = [
        Span(
            attempt.began,
            attempt.began + attempt.seconds,
            f"attempt {attempt.number}: {attempt.phase}, {duration(attempt.seconds)} {attempt.cause}",
            PHASES.get(attempt.phase, "good"),
        )
        for attempt in attempts
    ]
    rows = [
        [
            attempt.number,
            time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.began)),
            duration(attempt.seconds),
            attempt.ranks,
            "" if attempt.from_step is None else f"{attempt.from_step:,} to {attempt.to_step or 0:,}",
            attempt.phase,
            attempt.cause,
        ]
        for attempt in attempts[-ROWS:]
    ]
    names = ["Attempt", "Began", "Time", "Ranks", "Steps", "End", "Root cause"]
    return charts.timeline("Attempts over time", spans) + table(names, rows)


def _nodes(subject: Subject) -> str:
    record = subject.sources.record
    rows = []
    for node in record.cluster.nodes[:ROWS]:
        ranks = record.ranks.get(node.name, ())
        devices = record.devices.get(node.name, ())
        pairs = ", ".join(f"{rank} on {device}" for rank, device in zip(ranks, devices, strict=False))
        rows.append([node.name, node.address, f"{len(devices)} {node.kind}", pairs])
    text = table(["Node", "Address", "Devices", "Ranks on devices"], rows)
    if len(record.cluster.nodes) > ROWS:
        text += f"<p>{len(record.cluster.nodes) - ROWS} more nodes</p>"
    try:
        content = subject.run.rank_table.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return text
    return text + details("Rank table", pre(content[:TABLE_TEXT]))


def _results(subject: Subject) -> str:
    history = subject.history
    saved = [
        [
            line.step,
            size(line.facts["bytes"]) if isinstance(line.facts.get("bytes"), int) else "",
            _seconds(line),
            line.facts.get("path", ""),
        ]
        for line in history.kept_checkpoints()[-ROWS:]
    ]
    evals = [
        [step, f"{loss:.4f}", f"{math.exp(min(loss, 700.0)):.4g}"]
        for step, loss in history.kept_evals()[-ROWS:]
    ]
    text = newest(
        ["Step", "Size", "Seconds", "Checkpoint on its node"], saved, right=("Step", "Size", "Seconds")
    )
    text += newest(
        ["Step", "Validation loss", "Perplexity"], evals, right=("Step", "Validation loss", "Perplexity")
    )
    text += table(
        ["Step", "Task", "Convention", "Documents", "Figures", "Data"],
        [
            [result.step, result.task, result.convention, result.documents, figures_text(result), result.data]
            for result in subject.summary.evaluations[-ROWS:]
        ],
        right=("Step", "Documents"),
    )
    samples = [
        pre(f"step {line.facts.get('step', '')}: {line.facts.get('text', '')}"[:4000])
        for line in history.samples[-10:]
    ]
    return text + details("Sample texts", "".join(samples)) if samples else text


def _seconds(line: Metric) -> str:
    value = line.facts.get("seconds")
    return f"{value:.2f}" if isinstance(value, (int, float)) else ""


def _config(subject: Subject, other: RunDir | None) -> str:
    config = subject.config()
    text = ""
    if other is not None:
        theirs = Subject.of(other)
        rows = [[row.key, row.values[1], row.values[0]] for row in differences([config, theirs.config()])]
        text = f"<h3>Different from {safe(theirs.summary.run)}</h3>"
        text += (
            table(["Key", theirs.summary.run, "this run"], rows[:ROWS]) if rows else "<p>Nothing differs.</p>"
        )
    rows = [[key, value] for key, value in config.items()]
    return text + details(plural(len(rows), "setting"), table(["Key", "Value"], rows[: 4 * ROWS]))


def _versions(subject: Subject) -> str:
    start = subject.history.starts[-1].facts if subject.history.starts else {}
    names = ("torch", "engine", "precision", "zero", "device", "threads", "world", "layout", "parameters")
    rows = [(name, str(start[name])) for name in names if name in start]
    ops = start.get("native")
    for op in ops if isinstance(ops, list) else ():
        if isinstance(op, dict):
            rows.append((f"op {op.get('op')}", f"{op.get('backend')} ({op.get('reason')})"))
    return facts([("clusterctl", __version__), *rows])


def _events(subject: Subject) -> str:
    events = subject.sources.events.events[-ROWS:]
    rows = [
        [time.strftime("%m-%d %H:%M:%S", time.localtime(event.time)), event_text(event)] for event in events
    ]
    return newest(["Time", "Event"], rows, most=40)


def _logs(subject: Subject) -> str:
    """Return the last lines of the ranks that failed, or of the first ranks."""
    record, texts = subject.sources.record, []
    ranks = [(node, rank) for node, ranks in record.ranks.items() for rank in ranks]
    for node, rank in _interesting(subject, ranks)[:LOGS]:
        for stream in ("out", "err"):
            lines = last_lines(subject.run.log(node, rank, stream, record.attempt), LINES)
            if lines:
                text = "\n".join(line[:400] for line in lines)
                texts.append(
                    details(
                        f"rank {rank} on {node}, std{stream}: last {plural(len(lines), 'line')}", pre(text)
                    )
                )
    return "".join(texts)


def _interesting(subject: Subject, ranks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    try:
        state = read_state(subject.run)
    except UsageError:
        state = None
    failed = {rank.rank for rank in (state.ranks if state else ()) if rank.exit_code or rank.signal}
    return sorted(ranks, key=lambda pair: (pair[1] not in failed, pair[1]))
