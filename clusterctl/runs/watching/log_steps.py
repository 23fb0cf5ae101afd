"""Follow the steps of a program through its output, and record them as metrics in the run's folder.

Only the rank that reports steps first is read: with Megatron-LM the last rank, with other programs rank 0.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from clusterctl.files import add_lines
from clusterctl.jobs.run_lines import Metric
from clusterctl.logs.steps import FORMATS, LONGEST, StepParser, pattern_format
from clusterctl.logs.times import age_of
from clusterctl.runs.watching.updates import Source, Stream

if TYPE_CHECKING:
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import RunDir


class LogSteps:
    """Reads the output of a run's ranks; its methods may be called from several threads."""

    def __init__(self, run: RunDir, record: RunRecord) -> None:
        self.run, self.attempt = run, record.attempt
        self._pattern = record.job.progress
        self.wanted = record.job.train is None and self._pattern != "off"
        self._parsers: dict[tuple[str, int], StepParser] = {}
        self._rest: dict[Source, bytes] = {}
        self._lock = threading.Lock()
        self._source: tuple[str, int] | None = None
        self._started = self._has_start()

    def feed(self, source: Source, data: bytes, age: object = None) -> list[Metric]:
        """Return the metrics in a piece of a rank's output, after recording them.

        `age`: how many seconds ago its end was written, by the node's clock; None in the middle of a file.
        """
        if not self.wanted or source.stream not in (Stream.OUT, Stream.ERR) or not data:
            return []
        key = source.node, source.rank
        with self._lock:
            if self._source not in (None, key):
                return []
            metrics = list(self._read(key, source, data, age_of(age)))
            if metrics and self._source is None:
                self._source = key
            if metrics:
                self._write(metrics)
        return metrics

    @property
    def finished(self) -> bool:
        """Whether no further step is expected: the last one was reported, or the number of steps is not known."""
        parser = self._parsers.get(self._source) if self._source else None
        return parser is not None and parser.steps <= parser.step

    def _read(self, key: tuple[str, int], source: Source, data: bytes, age: float | None) -> Iterator[Metric]:
        whole = self._rest.pop(source, b"") + data
        # A progress bar ends its states with a carriage return.
        end = max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        # The state that it shows now is complete too, but ends without one.
        if b"%|" in whole[end:] and whole.endswith(b"]"):
            end = len(whole)
        self._rest[source] = whole[end:][-LONGEST:]
        if not end:
            return
        if key not in self._parsers:
            formats = (pattern_format(self._pattern),) if self._pattern else FORMATS
            self._parsers[key] = StepParser(formats)
        yield from self._with_start(self._parsers[key].feed(whole[:end], age))

    def end(self, node: str) -> list[Metric]:
        """Return the metrics of a node whose output has ended, after recording them."""
        with self._lock:
            parsers = [
                (key, parser)
                for key, parser in self._parsers.items()
                if key[0] == node and self._source in (None, key)
            ]
            for key, parser in parsers:
                if metrics := list(self._with_start(parser.end())):
                    self._source = key
                    self._write(metrics)
                    return metrics
        return []

    def _with_start(self, metrics: Iterator[Metric]) -> Iterator[Metric]:
        for metric in metrics:
            if not self._started and metric.kind == "step":
                self._started = True
                yield self._start_before(metric)
            yield metric

    def _start_before(self, first: Metric) -> Metric:
        """Return the start of the attempt whose first step was reported."""
        step, program = max((first.step or 0) - 1, 0), first.facts.get("format")
        facts = {"step": step, "attempt": self.attempt, "time": first.time, "format": program}
        return Metric("start", step, time=first.time, facts={"event": "start", **facts})

    def _has_start(self) -> bool:
        """Return whether an earlier controller has recorded the start of this attempt."""
        lines = self.run.metric_lines() if self.run.log_steps.exists() else ()
        return any(line.kind == "start" and line.facts.get("attempt") == self.attempt for line in lines)

    def _write(self, metrics: list[Metric]) -> None:
        lines = (json.dumps(metric.as_json()).encode() + b"\n" for metric in metrics)
        add_lines(self.run.log_steps, b"".join(lines))
