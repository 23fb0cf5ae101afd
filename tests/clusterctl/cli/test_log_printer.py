"""Lines on the screen: the quick way and the careful one say the same, and nothing gets through to a terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from clusterctl.cli import screen
from clusterctl.cli.views.log_printer import LogPrinter
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.lines import LogChunk
from clusterctl.logs.select import LogFilter
from clusterctl.runs.watching.watch import RunWatcher
from tests.support.records import record_of

ROOT = Path(__file__).resolve().parents[3]
EVERYBODY = LogFilter(everybody=True)
HOSTILE = b"\x1b]0;title\x07 \x1b[2J [/red] \xe2\x80\xae \x00 \xff 10%\r90%\n"


def printed(
    capsys: pytest.CaptureFixture[str], printer: LogPrinter, chunk: LogChunk, wanted: LogFilter
) -> str:
    printer.chunk(chunk, wanted)
    return capsys.readouterr().out


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(alphabet="ab \t", max_size=5), min_size=1, max_size=5))
def test_plain_chunks_are_printed_as_their_lines_are(
    capsys: pytest.CaptureFixture[str], texts: list[str]
) -> None:
    data = "".join(f"{text}\n" for text in texts).encode()
    for prefix in (True, False):
        printer, chunk = LogPrinter(prefix=prefix), LogChunk("node1", 3, "out", data)
        whole = printed(capsys, printer, chunk, EVERYBODY)
        by_line = printed(capsys, printer, chunk, LogFilter(everybody=True, exclude=re.compile("nowhere")))
        assert whole == by_line == "".join(f"{'node1:3 ' if prefix else ''}{text}\n" for text in texts)


def test_what_would_move_a_terminal_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    chunk = LogChunk("node1", 0, "out", HOSTILE.replace(b" 10%\r90%", b""))
    shown = printed(capsys, LogPrinter(), chunk, EVERYBODY)
    assert shown == "node1:0 \\x1b]0;title\\x07 \\x1b[2J [/red] \\u202e \\x00 \ufffd\n"
    bar = LogChunk("node1", 0, "out", HOSTILE)
    assert printed(capsys, LogPrinter(), bar, EVERYBODY) == "node1:0 90%\n"


def test_json_is_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, LogPrinter(as_json=True), LogChunk("n", 1, "err", b"a\nb\n"), EVERYBODY)
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["a", "b"]
    known = {"node": "n", "rank": 1, "stream": "err", "time": None, "text": "a"}
    assert json.loads(out.splitlines()[0]) == known
    timed = LogChunk("n", 1, "err", b"a\n", 1795865598.6734)
    out = printed(capsys, LogPrinter(as_json=True), timed, EVERYBODY)
    assert json.loads(out) == {**known, "time": 1795865598.673}
    out = printed(capsys, LogPrinter(times=True), timed, EVERYBODY)
    assert re.fullmatch(r"2026-11-\d\d \d\d:\d\d:18\.673 n:1 a\n", out), out


def test_a_rank_keeps_its_colour_and_errors_are_red(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(force_terminal=True, color_system="standard", highlight=False, no_color=False)
    monkeypatch.setattr(screen, "out_console", lambda: console)
    printer = LogPrinter()
    first = printed(capsys, printer, LogChunk("n", 1, "err", b"fine\n"), EVERYBODY)
    again = printed(capsys, printer, LogChunk("n", 1, "err", b"ValueError: no\n"), EVERYBODY)
    other = printed(capsys, printer, LogChunk("n", 2, "err", b"fine\n"), EVERYBODY)
    colour = first.partition("n:1")[0]
    assert colour.startswith("\x1b[")
    assert again.startswith(f"{colour}n:1")
    assert "\x1b[31mValueError: no" in again
    assert not other.startswith(colour)


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """A finished run whose only rank wrote a line of 100 MB between two others."""
    run = RunDir(tmp_path / "runs" / "long-1")
    run.write_record(record_of({"a": [0]}, run="long-1"))
    run.write_json(run.state, {"phase": "finished", "nodes": {"a": "finished"}})
    log = run.log("a", 0, "out")
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.write(b"before\n")
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b"\nafter")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["show"], ["tail", "-n", "3"], ["show", "--fold"], ["tail", "--grep", "e|x"]]
)
def test_a_line_of_100_mb_is_shown_in_part_in_little_memory(long_run: Path, words: list[str]) -> None:
    code = (
        "import sys; from clusterctl.cli.main import run\n"
        "try: run(sys.argv[1:])\n"
        # not ru_maxrss, which a process has from the one that started it
        "finally: sys.stderr.write(next(one for one in open('/proc/self/status') if one.startswith('VmHWM')))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    argv = [sys.executable, "-c", code, "logs", words[0], "last", *words[1:], "--no-prefix"]
    began = time.monotonic()
    done = subprocess.run(argv, cwd=long_run, env=env, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began < 100
    lines = done.stdout.splitlines()
    assert [line[:6] for line in lines] == ["before", "xxxxxx", "after"], done.stderr
    assert len(lines[1]) == (1 << 16) + len(" [...]")
    assert int(done.stderr.rpartition("VmHWM:")[2].split()[0]) < 120_000


def test_a_run_that_ends_while_its_nodes_are_connected_is_shown_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clusterctl.cli.main import run as command

    run = RunDir(tmp_path / "runs" / "short-1")
    # Nothing answers at this address, as at the nodes of an allocation that has ended.
    run.write_record(record_of({"a": [0]}, run="short-1"))
    run.write_json(run.state, {"phase": "finished", "nodes": {"a": "finished"}})
    run.log("a", 0, "out").parent.mkdir(parents=True)
    run.log("a", 0, "out").write_bytes(b"the only line\n")
    monkeypatch.chdir(tmp_path)
    actual, early = RunDir.phase, [Phase.RUNNING, Phase.RUNNING]
    monkeypatch.setattr(RunDir, "phase", lambda own: early.pop() if early else actual(own))
    monkeypatch.setattr(RunWatcher, "__iter__", lambda _: pytest.fail("followed nodes that are gone"))
    command(["logs", "tail", "-f", "last", "--no-prefix"])
    assert capsys.readouterr().out == "the only line\n"
