"""The live screen: what it shows at any size, its keys, and that it leaves the terminal clean."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from clusterctl.cli.runs.top import LiveScreen
from clusterctl.cli.views.live_lines import LineWriter
from clusterctl.cli.views.live_screen import ScreenLines
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.report.board import Board
from clusterctl.report.history import HistoryReader
from clusterctl.runs.state import RankState, RunState, write_state
from tests.clusterctl.conftest import Run
from tests.support.run_folders import BEGAN, restarted_run, step_line

ROOT = Path(__file__).resolve().parents[3]


def board_of(tmp_path: Path, ranks: int = 4) -> Board:
    run, other = restarted_run(tmp_path), restarted_run(tmp_path, "older-1122-090000-abcd")
    states = tuple(
        RankState(
            rank,
            node=f"node{rank % 2 + 1}",
            device=rank,
            exit_code=0,
            step=40,
            step_seconds=9.0 if rank == 1 else 0.4,
        )
        for rank in range(ranks)
    )
    write_state(run, RunState(Phase.FINISHED, {"node1": Phase.FINISHED, "node2": Phase.FINISHED}, states))
    for rank in (0, 1):
        log = run.log(f"node{rank % 2 + 1}", rank, "out", 2)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"line {number} of rank {rank}\n" for number in range(100)) + "\x1b[31mevil\n")
    board = Board([run, other])
    board.refresh()
    return board


def text_of(board: Board, width: int = 100, height: int = 40, *, unicode: bool = True, note: str = "") -> str:
    lines = ScreenLines(board, unicode=unicode).all_lines(width, height, note)
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_the_screen_shows_runs_ranks_curve_stragglers_and_a_log(tmp_path: Path) -> None:
    shown = text_of(board_of(tmp_path))
    for part in (
        "> tiny-1122-100000-abcd",
        "older-1122-090000-abcd",
        "step 40/40 (100%)",
        "loss 2.100  █",
        "500 ms per step",
    ):
        assert part.replace("> ", "") in shown, shown
    assert "22.5x slower" in shown and "line 99 of rank 0" in shown
    assert "\\x1b[31mevil" in shown and "j/k rank" in shown


@pytest.mark.parametrize(("width", "height"), [(60, 20), (40, 12), (200, 60), (80, 24)])
def test_it_fits_every_terminal_also_without_unicode(tmp_path: Path, width: int, height: int) -> None:
    lines = text_of(board_of(tmp_path, 64), width, height, unicode=False).splitlines()
    assert len(lines) == height and max(map(len, lines)) <= width
    assert all(line.isascii() for line in lines)


class Screen(io.StringIO):
    """What a terminal of some lines shows after what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


def test_only_changed_lines_are_written_and_all_after_a_new_size(tmp_path: Path) -> None:
    board, output = board_of(tmp_path, 64), Screen()
    screen, writer = ScreenLines(board, unicode=True), LineWriter(Console(file=output, force_terminal=True))
    writer.draw(screen.all_lines(100, 40), 100, 40)
    board.move(1)
    before = screen.ranks.lines(10, 100)
    writer.draw(screen.all_lines(100, 40), 100, 40)
    board.move(1)
    assert screen.ranks.lines(10, 100) != before
    writer.draw(screen.all_lines(60, 20), 60, 20)
    first, moved, smaller = output.writes
    assert first.startswith("\x1b[2J") and first.count("\x1b[K") == 40
    # The two rows of the cursor, the log with its name, and perhaps the clock.
    assert moved.count("\x1b[K") <= 2 + 1 + 10 + 1 and "\x1b[2J" not in moved and "7m" in moved
    assert smaller.startswith("\x1b[2J") and smaller.count("\x1b[K") == 20


def test_without_colour_only_bold_dim_and_reverse_are_used(tmp_path: Path) -> None:
    output = Screen()
    console = Console(file=output, force_terminal=True, no_color=True, color_system="truecolor")
    LineWriter(console).draw(ScreenLines(board_of(tmp_path), unicode=True).all_lines(100, 40), 100, 40)
    assert set(re.findall(r"\x1b\[([\d;]*)m", output.writes[0])) <= {"0", "1", "2", "7", "1;7"}


def test_keys_move_filter_switch_runs_and_end_it(tmp_path: Path) -> None:
    board = board_of(tmp_path)
    screen = LiveScreen(board)
    screen.press("j")
    assert board.rank == 1 and "line 99 of rank 1" in text_of(board)
    screen.press("G")
    assert board.rank == 3
    for key in "/node2\r":
        screen.press(key)
    assert [rank.rank for rank in board.ranks()] == [1, 3] and board.rank == 0
    screen.press("/")
    screen.press("\x1b")
    assert len(board.ranks()) == 4
    screen.press("n")
    assert board.run.run_id.startswith("older") and board.summary and board.summary.run.startswith("older")
    screen.press("s")
    assert screen.note.endswith("has ended") and not screen.asks_stop
    screen.press("q")
    assert screen.closed.is_set()


def test_stop_needs_a_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = board_of(tmp_path)
    stopped: list[str] = []
    screen = LiveScreen(board)
    monkeypatch.setattr(screen.live, "stop_run", lambda: stopped.append(board.run.run_id))
    write_state(board.run, RunState(Phase.RUNNING, {"node1": Phase.RUNNING}))
    for key in "sn":
        screen.press(key)
    assert not stopped
    for key in "sy":
        screen.press(key)
    assert stopped == [board.run.run_id]


def test_only_new_lines_of_the_metrics_are_read(tmp_path: Path) -> None:
    run = RunDir(restarted_run(tmp_path).root)
    reader = HistoryReader(run)
    before = len(reader.update().steps)
    import json

    line = json.dumps(step_line(41, 50, BEGAN)) + "\n"
    with run.metrics.open("a") as file:
        file.write(line[:30])
    assert len(reader.update().steps) == before
    with run.metrics.open("a") as file:
        file.write(line[30:])
    assert len(reader.update().steps) == before + 1 and reader.history.last.step == 41


def test_without_a_terminal_one_screen_is_printed(tmp_path: Path, command_line: Run) -> None:
    restarted_run(tmp_path / "runs")
    code, out, _ = command_line("top")
    assert code == 0 and "step 40/40" in out and "\x1b" not in out


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("option", ["--plain", ""])
def test_a_real_terminal_is_left_as_it_was(tmp_path: Path, option: str) -> None:
    if not option:
        pytest.importorskip("textual")
    board_of(tmp_path / "runs")
    socket = str(tmp_path / "tmux.socket")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}

    def tmux(*words: str) -> str:
        return subprocess.run(
            ["tmux", "-S", socket, *words], env=env, capture_output=True, text=True, timeout=20
        ).stdout

    def wait_for(text: str) -> str:
        deadline = time.monotonic() + 40
        while text not in (shown := tmux("capture-pane", "-p")) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert text in shown, shown
        return shown

    tmux("-f", "/dev/null", "new-session", "-d", "-x", "60", "-y", "24", "-c", str(tmp_path), "sh")
    try:
        tmux(
            "send-keys",
            f"stty -g | md5sum; {sys.executable} -m clusterctl top tiny {option}; stty -g | md5sum; echo END=$?",
            "Enter",
        )
        wait_for("line 99 of rank 0")
        tmux("send-keys", "j")
        wait_for("line 99 of rank 1")
        tmux("resize-window", "-x", "60", "-y", "20")
        assert max(map(len, wait_for("RANK").splitlines())) <= 60
        for size in (("30", "8"), ("100", "30")):
            tmux("resize-window", "-x", size[0], "-y", size[1])
            time.sleep(1)
        wait_for("line 99 of rank 1")
        tmux("send-keys", "q")
        after = wait_for("END=0")
        # The smaller screen pushed the first one into the history.
        history = tmux("capture-pane", "-p", "-S", "-").splitlines()
        sums = [line.split()[-2] for line in history if line.endswith("  -")]
        assert len(sums) == 2 and len(set(sums)) == 1
        assert "line 99" not in after and "RANK" not in after and "tiny-" not in after
    finally:
        tmux("kill-server")
