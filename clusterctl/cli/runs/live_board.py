"""The data of both screens of `top`, kept up to date by requests to the nodes, and the stop of the shown run."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from clusterctl.cli import choices
from clusterctl.errors import ClusterctlError

if TYPE_CHECKING:
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.report.board import Board

# Seconds between two frames, two reads of the local files, and two requests to the nodes.
FRAME, REFRESH, ASK = 0.1, 0.5, 2.0
# The files of a run with many steps are read less often: reading takes at most one part in this many of the time.
SHARE = 50


class LiveBoard:
    """Asks the nodes of the chosen run from a thread of its own, and stops the run when the user asks for it."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.note = ""
        self.closed = threading.Event()
        self._stopping: threading.Thread | None = None
        self._next_reading = 0.0
        self._read_run = ""

    def start(self) -> None:
        """Start to query the nodes."""
        threading.Thread(target=self._ask_nodes, daemon=True, name="ask nodes").start()

    def read_files(self) -> bool:
        """Read the files of the chosen run if it is time to; return whether they were read."""
        began, run = time.monotonic(), self.board.run.run_id
        if began < self._next_reading and run == self._read_run:
            return False
        self.board.refresh()
        self._read_run, ended = run, time.monotonic()
        self._next_reading = ended + max(REFRESH, SHARE * (ended - began))
        return True

    def stop_run(self) -> None:
        """Stop the chosen run; the note shows the result."""
        from clusterctl.client.run import Run

        run = self.board.run
        self.note = f"stopping {run.run_id}"
        client = Run(run, choices.reach())

        def work() -> None:
            try:
                client.end().require_none_left()
                self.note = f"stopped {run.run_id}"
            except ClusterctlError as error:
                self.note = error.message

        self._stopping = threading.Thread(target=work, name="stop")
        self._stopping.start()

    def _ask_nodes(self) -> None:
        """Ask the nodes of the chosen run for its ranks, while it is active."""
        queried = ""
        while not self.closed.is_set():
            run = self.board.run
            if run.run_id == queried or run.phase().is_final:
                self.closed.wait(ASK / 4)
                queried = "" if run.run_id != queried else queried
                continue
            try:
                self._follow(run)
            except (ClusterctlError, OSError) as error:
                self.note = getattr(error, "message", str(error)).splitlines()[0]
                queried = run.run_id

    def _follow(self, run: RunDir) -> None:
        from clusterctl.client.run import Run

        for state, usage in Run(run, choices.reach()).observe(ASK):
            if self.closed.is_set() or self.board.run is not run:
                return
            self.board.live, self.board.usage = state, usage
            self.closed.wait(ASK)
        if self.board.run is run:
            self.board.live, self.board.usage = None, {}
