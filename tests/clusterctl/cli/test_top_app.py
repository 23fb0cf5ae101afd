"""The screen of `top` with Textual: the same board, its keys, and usage of devices; without a terminal."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.runs.live_board import LiveBoard
from clusterctl.jobs.phase import Phase
from clusterctl.runs.state import RunState, write_state
from clusterctl.runs.watching import usage
from clusterctl.runs.watching.usage import DeviceUsage
from tests.clusterctl.cli.test_top import board_of

pytest.importorskip("textual")

NPU_SMI = """
| NPU     Name              | Health        | Power(W)    Temp(C)           Hugepages-Usage(page) |
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)         |
+===========================+===============+=====================================================+
| 0       910B3             | OK            | 92.6        35                0    / 0              |
| 0                         | 0000:C1:00.0  | 37          0    / 0          3317 / 65536          |
| 1       910B3             | OK            | 90.2        36                0    / 0              |
| 0                         | 0000:01:00.0  | 0           0    / 0          3312 / 65536          |
+---------------------------+---------------+-----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)       |
| 0       0                 | 3482          | python                   | 512                      |
"""


def in_app(
    tmp_path: Path, act: Callable[[Any, Any], Awaitable[None]], size: tuple[int, int] = (110, 40)
) -> None:
    """Run the screen without a terminal and act on it."""
    from clusterctl.cli.views.top_app import TopApp

    live = LiveBoard(board_of(tmp_path))
    live.board.usage = {0: DeviceUsage(3 << 30, 64 << 30, 0.5)}

    async def work() -> None:
        app = TopApp(live)
        async with app.run_test(size=size) as pilot:
            await pilot.pause(0.3)
            await act(app, pilot)

    asyncio.run(work())


def ranks(app: Any) -> list[str]:
    return ["".join(text for text, _ in line) for line in app.query_one("#ranks").lines]


def log(app: Any) -> list[str]:
    from textual.widgets import Log

    return list(app.query_one(Log).lines)


def test_the_log_appears_as_soon_as_the_nodes_have_answered(tmp_path: Path) -> None:
    async def act(app: Any, pilot: Any) -> None:
        answer = app.board.state()
        app.board.live = replace(answer, ranks=())
        app._draw_log()
        assert log(app) == []
        # The files of a long run are read seldom.
        app.live._next_reading = math.inf
        app.board.live = answer
        await pilot.pause(0.5)
        assert "line 99 of rank 0" in log(app)

    in_app(tmp_path, act)


@pytest.mark.slow
def test_it_shows_the_board_and_its_keys_move_filter_and_switch(tmp_path: Path) -> None:
    async def act(app: Any, pilot: Any) -> None:
        rows = ranks(app)[1:]
        assert len(rows) == 4 and "22.5x slower" in rows[1]
        assert rows[0].split()[-3:] == ["GB/68.7", "GB", "50%"]
        assert "line 99 of rank 0" in log(app) and "\\x1b[31mevil" in log(app)
        await pilot.press("j")
        assert app.board.rank == 1 and "line 99 of rank 1" in log(app)
        # Letters of a filter are no keys.
        await pilot.press("slash", "n", "o", "d", "e", "2", "enter")
        assert app.board.text == "node2" and [row[2:].split()[0] for row in ranks(app)[1:]] == ["1", "3"]
        assert ranks(app)[0].endswith("filter: node2")
        await pilot.press("slash", "escape")
        assert app.board.text == "" and len(ranks(app)) == 5
        await pilot.press("l")
        assert app.screen.has_class("long")
        await pilot.press("n")
        assert app.board.run.run_id.startswith("older")
        await pilot.press("q")
        assert not app.is_running or app._exit

    in_app(tmp_path, act)


def test_only_a_yes_stops_the_run(tmp_path: Path) -> None:
    async def act(app: Any, pilot: Any) -> None:
        stopped: list[str] = []
        app.live.stop_run = lambda: stopped.append(app.board.run.run_id)
        await pilot.press("s")
        assert "has ended" in app.live.note
        write_state(app.board.run, RunState(Phase.RUNNING, {"node1": Phase.RUNNING}))
        await pilot.press("escape", "y")
        for other in ("x", "j", "escape"):
            await pilot.press("s")
            assert "y/n" in app.live.note
            await pilot.press(other, "y")
        assert not stopped
        await pilot.press("s", "y")
        assert stopped == [app.board.run.run_id]

    in_app(tmp_path, act)


def test_it_fits_a_small_terminal_and_follows_its_size(tmp_path: Path) -> None:
    async def act(app: Any, pilot: Any) -> None:
        assert ranks(app)[0].split()[:4] == ["RANK", "NODE", "STATE", "STEP"]
        await pilot.resize_terminal(110, 40)
        await pilot.pause(0.3)
        assert ranks(app)[0].split()[-2:] == ["MEMORY", "BUSY"]
        # A click chooses the rank below the head.
        await pilot.click("#ranks", offset=(5, 3))
        assert app.board.rank == 2

    in_app(tmp_path, act, (60, 20))


def test_usage_is_read_from_the_tools_and_from_proc() -> None:
    npus = usage.npu_usage(NPU_SMI)
    assert npus == {
        0: DeviceUsage(3317 << 20, 65536 << 20, 0.37),
        1: DeviceUsage(3312 << 20, 65536 << 20, 0.0),
    }
    gpus = usage.gpu_usage("0, 1024, 81559, 97\n1, [N/A], 81559, 0\n")
    assert gpus == {0: DeviceUsage(1 << 30, 81559 << 20, 0.97)}
    with open("/proc/self/stat") as file:
        (pid, (ticks, memory)) = next(iter(usage.process_usage(file.read()).items()))
    assert pid > 0 and ticks >= 0 and memory > 1 << 20


def test_a_long_log_ends_with_the_newest_line_and_escape_leaves_step_by_step(tmp_path: Path) -> None:
    async def act(app: Any, pilot: Any) -> None:
        from textual.widgets import Log

        view = app.query_one(Log)
        await pilot.press("slash", "n", "o", "d", "e", "2", "enter", "l")
        await pilot.pause(0.3)
        assert view.max_scroll_y > 0 and view.is_vertical_scroll_end
        await pilot.press("escape")
        await pilot.pause()
        assert not app.screen.has_class("long")
        await pilot.press("escape")
        assert app.board.text == "" and not app._exit
        await pilot.press("escape")
        assert app._exit

    in_app(tmp_path, act, size=(60, 24))
