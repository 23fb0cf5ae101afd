"""Read a run's metrics into columns: 100,000 steps in about a second."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass, field

from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Metric, read_metric
from clusterctl.wire.typed_json import BadValue, parse

# Bytes of metrics per read.
BLOCK = 8 << 20
_NUMBER = rb"(-?[0-9.]+(?:e[-+]?[0-9]+)?|null)"
# The form in which the embedded trainer writes a step. Any other line is read as JSON, which takes five times as long.
_STEP = re.compile(
    rb'\{"event": "step", "step": (\d{1,15}), "steps": (\d{1,15}), "loss": %b, "lr": %b, "grad_norm": %b, '
    rb'"tokens": (\d{1,18}), "tokens_per_second": %b, "step_seconds": %b, "skipped": (true|false), "cause": "", '
    rb'"own_seconds": %b, [^\n]*"time": %b\}\n' % ((_NUMBER,) * 7)
)
# The columns in the order of that form.
OF_TRAINER = ("loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "own_seconds", "time")
# Programs that report no tokens may report samples per second.
COLUMNS = (*OF_TRAINER[:5], "samples_per_second", *OF_TRAINER[5:])


@dataclass
class Steps:
    """The steps of a run in the order in which they were done, as columns; a missing value is NaN."""

    step: array[int] = field(default_factory=lambda: array("q"))
    start: array[int] = field(default_factory=lambda: array("l"))
    """By step, the index of the start that did it: 0, 1, ..."""
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> array[float]:
        return self.columns[name]

    def kept(self) -> list[int]:
        """Return the indexes of the steps that count: for a repeated step, only the last time counts."""
        indexes: list[int] = []
        for index in range(len(self.step) - 1, -1, -1):
            if not indexes or self.step[index] < self.step[indexes[-1]]:
                indexes.append(index)
        indexes.reverse()
        return indexes


@dataclass
class History:
    """The content of a run's metrics."""

    starts: list[Metric] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    evals: list[Metric] = field(default_factory=list)
    eval_starts: list[int] = field(default_factory=list)
    """By evaluation, the index of the start that did it, as steps have it."""
    checkpoints: list[Metric] = field(default_factory=list)
    memory: list[Metric] = field(default_factory=list)
    failures: list[Metric] = field(default_factory=list)
    last: Metric = field(default_factory=Metric)
    """The last step with all of its values."""
    samples: list[Metric] = field(default_factory=list)
    """Texts that were generated during the training."""
    evaluations: list[Metric] = field(default_factory=list)
    """Results of tasks that the training evaluated."""

    def add(self, metric: Metric) -> None:
        """Add one line of metrics."""
        start = max(len(self.starts) - 1, 0)
        if metric.kind == "step":
            self.last = metric
            self.steps.step.append(metric.step or 0)
            self.steps.start.append(start)
            for name in COLUMNS:
                value = metric.facts.get(name)
                if name == "samples_per_second" and metric.tokens_per_second is not None:
                    value = None
                self.steps[name].append(float(value) if isinstance(value, (int, float)) else math.nan)
            return
        if metric.kind == "eval":
            self.eval_starts.append(start)
        lists = {
            "start": self.starts,
            "eval": self.evals,
            "checkpoint": self.checkpoints,
            "memory": self.memory,
            "failed": self.failures,
            "evaluation": self.evaluations,
            "sample": self.samples,
        }
        if metric.kind in lists:
            lists[metric.kind].append(metric)

    def kept_evals(self) -> list[tuple[int, float]]:
        """Return (step, validation loss), each step once: as it was computed last."""
        return sorted({line.step or 0: line.loss or 0.0 for line in self.evals}.items())

    def kept_checkpoints(self) -> list[Metric]:
        """Return the checkpoints, each step once: as it was saved last."""
        return [line for _, line in sorted({line.step or 0: line for line in self.checkpoints}.items())]


class HistoryReader:
    """Reads the metrics of a run, and later only what was added since."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.history = run, History()
        self._path, self._offset = run.progress, 0

    def update(self) -> History:
        """Return the history with all new lines; an incomplete last line is left for the next call."""
        if self.run.progress != self._path:
            # The program has started to write metrics itself.
            self.history, self._path, self._offset = History(), self.run.progress, 0
        try:
            file = self._path.open("rb")
        except OSError:
            return self.history
        with file:
            file.seek(self._offset)
            while block := file.read(BLOCK):
                end = block.rfind(b"\n") + 1
                if not end and len(block) < BLOCK:
                    break
                # No writer makes a line as long as a block.
                self._offset += end or len(block)
                file.seek(self._offset)
                _feed(self.history, block[:end])
        return self.history


def read_history(run: RunDir) -> History:
    """Return the history in the local copy of a run's metrics, without damaged lines."""
    return HistoryReader(run).update()


def _feed(history: History, block: bytes) -> None:
    """Add a block of complete lines."""
    position, last = 0, b""
    for match in _STEP.finditer(block):
        if match.start() != position:
            _add_lines(history, block[position : match.start()])
        _add_step(history, match)
        position, last = match.end(), match[0]
    if position != len(block):
        _add_lines(history, block[position:])
    if last and (metric := _metric(last)) is not None and metric.step == history.steps.step[-1]:
        history.last = metric


def _add_step(history: History, match: re.Match[bytes]) -> None:
    step, _, loss, lr, norm, tokens, rate, seconds, _, own, at = match.groups()
    steps = history.steps
    steps.step.append(int(step))
    steps.start.append(max(len(history.starts) - 1, 0))
    for name, text in zip(OF_TRAINER, (loss, lr, norm, tokens, rate, seconds, own, at), strict=True):
        steps.columns[name].append(_float(text))
    steps.columns["samples_per_second"].append(math.nan)


def _float(text: bytes) -> float:
    try:
        value = float(text) if text != b"null" else math.nan
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _add_lines(history: History, block: bytes) -> None:
    for line in block.split(b"\n"):
        if line and (metric := _metric(line)) is not None:
            history.add(metric)


def _metric(line: bytes) -> Metric | None:
    try:
        return read_metric(parse(line))
    except BadValue:
        return None
