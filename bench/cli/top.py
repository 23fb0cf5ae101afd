"""Measure the processor time of `top` with 8 x 8 ranks. Run it in a terminal.

    python -m bench.cli.top [--plain] [--every S]

For 20 seconds a thread gives the board new steps of all ranks every S seconds (default 2, as in real use).
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.field import read_options
from clusterctl.cli.runs.live_board import LiveBoard
from clusterctl.cli.runs.top import LiveScreen
from clusterctl.jobs.phase import Phase
from clusterctl.report.board import Board
from clusterctl.runs.state import RankPhase, RankState, RunState
from clusterctl.runs.watching.usage import DeviceUsage
from tests.support.run_folders import restarted_run

NODES = DEVICES = 8
SECONDS = 20.0


def states(step: int) -> RunState:
    """Return the state of a run whose ranks are all at `step`."""
    ranks = tuple(
        RankState(
            number,
            RankPhase.RUNNING,
            node=f"node{number // DEVICES + 1}",
            device=number % DEVICES,
            step=step,
            step_age=0.1 * (step % 7),
            step_seconds=0.4 + 0.001 * (step + number) % 0.05,
        )
        for number in range(NODES * DEVICES)
    )
    return RunState(Phase.RUNNING, {f"node{n + 1}": Phase.RUNNING for n in range(NODES)}, ranks)


def feed(board: Board, every: float, closed: threading.Event) -> None:
    """Give the board new values until it is closed; they are computed before, so that only the screen is measured."""
    values = [(states(step), usage(step)) for step in range(1, 100)]
    for live, usages in itertools.cycle(values):
        if closed.wait(every):
            return
        board.live, board.usage = live, usages


def usage(step: int) -> dict[int, DeviceUsage]:
    """Return the usage of all devices at a step."""
    return {
        rank: DeviceUsage(((rank + step) % 60) << 30, 64 << 30, (rank + step) % 100 / 100)
        for rank in range(NODES * DEVICES)
    }


def main() -> None:
    """Show the screen for some seconds, then print the share of a core that it used."""
    arguments = read_options(__doc__, plain=False, every=2.0)
    with tempfile.TemporaryDirectory() as folder:
        board = Board([restarted_run(Path(folder))])
        board.live = states(0)
        live: LiveBoard = LiveBoard(board)
        plain = LiveScreen(board)
        shown = plain.live if arguments.plain else live
        # Do not contact nodes.
        shown.start = lambda: None  # type: ignore[method-assign]
        threading.Thread(target=feed, args=(board, arguments.every, shown.closed), daemon=True).start()
        used: list[float] = []

        def measure() -> None:
            time.sleep(3.0)
            began, at = time.process_time(), time.monotonic()
            time.sleep(SECONDS)
            used.append((time.process_time() - began) / (time.monotonic() - at))
            shown.closed.set()
            if not arguments.plain:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=measure, daemon=True).start()
        if arguments.plain:
            plain.run()
        else:
            from clusterctl.cli.views.top_app import TopApp

            TopApp(live).show()
    print(f"{used[0]:.1%} of a core; new values every {arguments.every:g} s", file=sys.stderr)


if __name__ == "__main__":
    main()
