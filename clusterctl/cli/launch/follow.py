"""Show a run while it is active: a progress line for a training, output lines for a program."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from clusterctl.cli import screen
from clusterctl.cli.views.log_printer import LogPrinter
from clusterctl.cli.views.tables import log_line, start_text, step_text
from clusterctl.cli.views.waiting import Waiting
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.lines import LogChunk
from clusterctl.logs.select import LogFilter
from clusterctl.runs.overview import TrainProgress
from clusterctl.text import duration

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from clusterctl.runs.watching.updates import Update

# Seconds without a step after which the progress line says so.
SILENT = 2.0
# Seconds between two progress lines without a terminal.
EVERY = 10.0


class Follower:
    """Shows updates as they arrive; as a context manager it removes the progress line at the end."""

    def __init__(
        self,
        run: RunDir,
        *,
        quiet: bool = False,
        as_json: bool = False,
        progress: TrainProgress | None = None,
    ) -> None:
        """`progress` is the run's progress before the first update that is shown."""
        self.run, self.quiet, self.as_json = run, quiet, as_json
        self.trains = trains = run.read_record().job.train is not None
        self.progress = progress or TrainProgress()
        self.filter = LogFilter()
        self.printer = LogPrinter(as_json=as_json)
        self.live: Live | None = None
        self.last_line = 0.0
        self.last_metric = time.monotonic()
        # Until the first step, or a program's first line.
        subject = "the first step: libraries and data are loaded" if trains else "the first output"
        self.waiting = Waiting(subject, quiet=quiet or as_json)

    def __enter__(self) -> Follower:
        self.waiting.__enter__()
        if self.trains and self.progress.start.kind and not (self.quiet or self.as_json):
            self.waiting.line("train      " + start_text(self.progress.start), then="the next step")
            if self.progress.last:
                self._show_progress()
        return self

    def _start_live(self) -> None:
        """Begin the progress line of a training, at its first step on a terminal."""
        if self.live or self.quiet or self.as_json or not screen.on_terminal():
            return
        from rich.live import Live

        self.live = Live(
            get_renderable=self._progress_line,
            console=screen.error_console(),
            refresh_per_second=8,
            transient=True,
        )
        self.live.start()

    def _progress_line(self) -> Text:
        """Return the progress line; after two seconds without a step it says for how long."""
        assert self.progress.last is not None
        text = "train      " + step_text(self.progress.last, self.progress.left)
        silent = time.monotonic() - self.last_metric
        if silent > SILENT and self.progress.step_seconds and silent > 3 * self.progress.step_seconds:
            text += f"  (no step for {duration(silent)})"
        return screen.safe(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.close()
        if self.live:
            self.live.stop()
        if self.trains and self.progress.last and not self.quiet and not self.live:
            screen.log("train      " + step_text(self.progress.last, self.progress.left))

    def show(self, update: Update) -> None:
        """Show one update."""
        if update.chunk and not self.trains:
            # Its lines go to stdout.
            self.waiting.close()
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
            self.waiting.line(update.note, "yellow")

    def _errors_of(self, chunk: LogChunk) -> None:
        """Show the errors in a chunk; the progress line replaces the other output of a training."""
        if chunk.stream == "err" and chunk.may_hold_errors():
            for line in chunk.lines():
                if line.is_error:
                    self.waiting.close()
                    screen.error_console().print(log_line(line))

    def _metric(self, update: Update) -> None:
        assert update.metric is not None
        self.progress.feed(update.metric)
        self.last_metric = time.monotonic()
        if self.quiet or self.as_json:
            return
        if update.metric.kind == "start":
            self.waiting.line("train      " + start_text(update.metric), then="the first step")
        if self.progress.last and update.metric.kind == "step":
            self._show_progress()

    def _show_progress(self) -> None:
        """Show the last step: in the progress line of a terminal, without a terminal as a new line from time to
        time.
        """
        assert self.progress.last is not None
        self.waiting.close()
        self._start_live()
        if self.live:
            self.live.refresh()
        elif time.monotonic() - self.last_line > EVERY:
            self.last_line = time.monotonic()
            screen.log("train      " + step_text(self.progress.last, self.progress.left))
