"""Show a run while it is active: a progress line for a training, output lines for a program."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from clusterctl.cli import screen
from clusterctl.cli.log_printer import LogPrinter
from clusterctl.cli.views import log_line, start_text, step_text
from clusterctl.logs.store import LogFilter
from clusterctl.runs.overview import TrainProgress, read_progress

if TYPE_CHECKING:
    from rich.live import Live

    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.logs.lines import LogChunk
    from clusterctl.runs.updates import Update

# Seconds between two progress lines without a terminal.
EVERY = 10.0


class Follower:
    """Shows updates as they arrive; as a context manager it removes the progress line at the end."""

    def __init__(self, run: RunDir, *, trains: bool, quiet: bool = False, as_json: bool = False) -> None:
        self.run, self.trains, self.quiet, self.as_json = run, trains, quiet, as_json
        self.progress = read_progress(run.metric_lines()) if trains else TrainProgress()
        self.filter = LogFilter()
        self.printer = LogPrinter(as_json=as_json)
        self.live: Live | None = None
        self.last_line = 0.0

    def __enter__(self) -> Follower:
        if self.trains and not self.quiet and not self.as_json and screen.on_terminal():
            from rich.live import Live

            self.live = Live("", console=screen.error_console(), refresh_per_second=8, transient=True)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()
        if self.trains and self.progress.last and not self.quiet and not self.live:
            screen.log("train      " + step_text(self.progress.last, self.progress.left))

    def show(self, update: Update) -> None:
        """Show one update."""
        if update.metric is not None:
            # The steps of a program are in the lines that it writes.
            if self.trains:
                self._metric(update)
        elif self.quiet:
            return
        elif update.chunk and self.as_json:
            self.printer.lines(update.chunk.lines())
        elif update.chunk and self.trains:
            self._errors_of(update.chunk)
        elif update.chunk:
            self.printer.chunk(update.chunk, self.filter)
        elif update.note:
            screen.log(update.note, "yellow")

    def _errors_of(self, chunk: LogChunk) -> None:
        """Show the errors in a chunk; the progress line replaces the other output of a training."""
        if chunk.stream == "err" and chunk.may_hold_errors():
            for line in chunk.lines():
                if line.is_error:
                    screen.error_console().print(log_line(line))

    def _metric(self, update: Update) -> None:
        assert update.metric is not None
        self.progress.feed(update.metric)
        if self.quiet or self.as_json:
            return
        if update.metric.get("event") == "start":
            screen.log("train      " + start_text(update.metric))
        if not self.progress.last:
            return
        if self.live:
            self.live.update(screen.safe("train      " + step_text(self.progress.last, self.progress.left)))
        elif update.metric.get("event") == "step" and time.monotonic() - self.last_line > EVERY:
            self.last_line = time.monotonic()
            screen.log("train      " + step_text(self.progress.last, self.progress.left))
