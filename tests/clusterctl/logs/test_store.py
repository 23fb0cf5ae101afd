"""Lines out of bytes: progress bars, missing ends, endless lines, cut connections."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.lines import (
    CUT,
    LONGEST_LINE,
    LineCutter,
    LogChunk,
    LogLine,
    shown,
)
from clusterctl.logs.select import LogFilter, Selection, last_of, parse_ranks
from clusterctl.logs.store import ALWAYS, LogKeeper, kept_chunks, kept_files, last_lines
from clusterctl.logs.times import LogTimes, Span, entries_of, index_of, moment, offset_since


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_lines_do_not_depend_on_how_the_bytes_were_cut(data: bytes, cuts: list[int]) -> None:
    whole = LineCutter()
    expected = shown(whole.feed(data) + whole.end())
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = LineCutter()
    got = [line for first, end in itertools.pairwise(edges) for line in shown(parts.feed(data[first:end]))]
    assert got + shown(parts.end()) == expected


def test_a_progress_bar_shows_its_last_state_and_bad_bytes_are_replaced() -> None:
    assert shown(LineCutter().feed(b"10%\r50%\r100%\r\n\xff\n")) == ["100%", "\ufffd"]


@given(st.lists(st.sampled_from([b"x" * 30_000, b"y" * 70_000, b"\r", b"\n", b"10%", b"z"]), max_size=30))
def test_endless_lines_are_shown_in_part_the_same_however_they_come(parts: list[bytes]) -> None:
    whole, pieces, at_once = LineCutter(), LineCutter(), b"".join(parts)
    expected = shown(whole.feed(at_once) + whole.end())
    assert [line for part in parts for line in shown(pieces.feed(part))] + shown(pieces.end()) == expected
    assert len(pieces.rest) <= LONGEST_LINE + 2


def test_a_line_of_100_mb_is_shown_once_in_part_with_bounded_memory() -> None:
    cutter, piece, most = LineCutter(), b"x" * 100_000, 0
    for _ in range(1000):
        assert cutter.feed(piece) == b""
        most = max(most, len(cutter.rest))
    assert most <= LONGEST_LINE + 2
    assert shown(cutter.feed(b"tail\nnext\n")) == ["x" * LONGEST_LINE + CUT.decode(), "next"]


def test_a_progress_bar_of_100_mb_shows_its_last_state() -> None:
    cutter = LineCutter()
    for step in range(20_000):
        assert cutter.feed(b"\r%5d/20000 %s" % (step, b"#" * 100)) == b""
        assert len(cutter.rest) <= LONGEST_LINE + 120
    assert shown(cutter.feed(b"\r20000/20000 done\n")) == ["20000/20000 done"]


def test_looking_for_errors_takes_no_longer_for_an_endless_word() -> None:
    began = time.monotonic()
    assert not LogLine("n", 0, "out", "x" * LONGEST_LINE).is_error
    # Quadratic, it took minutes.
    assert time.monotonic() - began < 5.0


def test_a_chunk_that_comes_twice_is_kept_once_and_a_gap_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a" / "rank-0.out"
    assert LogKeeper.keep(path, 0, b"hello ") == b"hello "
    assert LogKeeper.keep(path, 3, b"lo world") == b"world"
    assert path.read_bytes() == b"hello world"
    with pytest.raises(ValueError, match="are missing"):
        LogKeeper.keep(path, 100, b"x")


def test_by_default_rank_0_is_shown_and_every_ranks_errors() -> None:
    lines = [
        LogLine("n", 0, "out", "step 1"),
        LogLine("n", 3, "out", "step 1"),
        LogLine("n", 3, "err", "RuntimeError: x"),
    ]
    assert [LogFilter().wants(line) for line in lines] == [True, False, True]
    assert LogFilter().wants(LogLine("n", 3, "err", "Traceback (most recent call last):"))
    assert not LogFilter().wants(LogLine("n", 3, "out", "no errorless words here"))
    assert LogFilter(ranks=frozenset([3])).wants(lines[1])
    assert LogFilter(grep=re.compile("step")).wants(lines[1])
    assert not LogFilter(ranks=frozenset([3]), exclude=re.compile("step")).wants(lines[1])


@pytest.mark.parametrize(
    ("text", "is_error"),
    [
        ("every step took 3 s", False),
        ("EI0006: Getting socket times out", True),
        ("[ERROR] x", True),
        ("E39999: Inner Error", True),
        ("ZeroDivisionError: division by zero", True),
        ("Killed", True),
        ("Epoch12345", False),
    ],
)
def test_error_lines_are_known(text: str, is_error: bool) -> None:
    assert LogLine("n", 0, "out", text).is_error is is_error


@given(st.text(), st.sampled_from([0, 3]), st.sampled_from(["out", "err"]))
def test_what_is_said_of_a_chunk_holds_for_each_of_its_lines(text: str, rank: int, stream: str) -> None:
    chunk = LogChunk("n", rank, stream, text.encode("utf-8", "replace").replace(b"\n", b" Error\n") + b"\n")
    for wanted in (
        LogFilter(),
        LogFilter(errors_only=True),
        LogFilter(ranks=frozenset([3])),
        LogFilter(exclude=re.compile("E")),
        LogFilter(nodes=frozenset(["m"])),
    ):
        answers = {wanted.wants(line) for line in chunk.lines()}
        assert answers <= ({True} if wanted.wants_all(chunk) else {True, False})
        assert answers <= ({False} if wanted.wants_none(chunk) else {True, False})


def test_the_last_lines_are_found_however_far_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lines = [f"{number} {'needle' if number % 9000 == 1 else 'hay'}" for number in range(30_000)]
    LogKeeper.keep(run.log("a", 0, "out"), 0, "\n".join(lines).encode())
    (file,) = kept_files(run)
    assert [line.text for line in file.last(2, LogFilter())] == lines[-2:]
    assert file.last(0, LogFilter()) == []
    needles = [line for line in lines if "needle" in line]
    for count in (1, 3, 100):
        found = file.last(count, LogFilter(grep=re.compile("needle")))
        assert [line.text for line in found] == needles[-count:]


def test_since_begins_where_the_index_says(tmp_path: Path) -> None:
    log, now = tmp_path / "rank-0.out", time.time()
    LogKeeper.keep(log, 0, b"old\nolder\nnew\n")
    index_of(log).write_text(f"{now - 7200:.3f} 4\n{now - 3600:.3f} 10\n{now - 60:.3f} 14\n")
    assert offset_since(log, now - 9000) == 0
    assert offset_since(log, now - 5000) == 4
    assert offset_since(log, now - 600) == 10
    assert offset_since(log, now - 30) == 14
    assert offset_since(log, now + 30) == 14
    times = LogTimes()
    times.note(log, 14, 1e12)
    times.note(log, 14, "x")
    times.note(log, 14, 5.0)
    times.note(log, 15, 4.98)
    times.note(log, 16, 4.96)
    assert len(index_of(log).read_text().splitlines()) == 4
    # An hour of silence.
    times._noted[log] -= 3600
    times.note(log, 30, 0.0)
    assert [line.split()[1] for line in index_of(log).read_text().splitlines()[3:]] == ["14", "16", "30"]


def test_a_time_is_read_or_refused() -> None:
    now = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
    assert now - moment("90s", now) == 90
    assert now - moment("1.5h", now) == 5400
    assert now - moment("11:30", now) == 1800
    assert now - moment("2026-03-03 12:00", now) == 86400
    for bad in ("", "10", "yesterday", "25:00", "-5m"):
        with pytest.raises(UsageError, match="not a time"):
            moment(bad, now)


def test_times_of_a_log_do_not_go_back_unless_the_clock_does(tmp_path: Path) -> None:
    log, times = tmp_path / "rank-0.out", LogTimes()
    # The second chunk was written before the first one's time: the first one had waited here.
    for end, age in ((1, 100.0), (2, 101.0), (3, 99.0), (4, 99.5), (5, 50.0), (6, 3650.0)):
        times.note(log, end, age)
    entries = entries_of(log)
    assert [end for _, end in entries] == [1, 2, 3, 4, 5, 6]
    assert [written for written, _ in entries[:5]] == sorted(written for written, _ in entries[:5])
    assert entries[5][0] < entries[0][0], "somebody set the clock"


def write(run: RunDir, rank: int, stream: str, lines: dict[float, str]) -> None:
    """Write lines and the times at which they were written."""
    log = run.log(f"n{rank}", rank, stream)
    text, index = "", ""
    for at, line in lines.items():
        text += line
        index += f"{at:.3f} {len(text)}\n"
    LogKeeper.keep(log, 0, text.encode())
    index_of(log).write_text(index)


def shown_lines(run: RunDir, wanted: LogFilter, span: Span = ALWAYS) -> list[tuple[float, str]]:
    selection, chunks = Selection(wanted), kept_chunks(run, wanted, span=span)
    return [(line.at, line.text) for chunk in chunks for line in selection.of(chunk.lines())]


def test_lines_of_all_streams_come_in_the_order_of_time(tmp_path: Path) -> None:
    run, all_ranks = RunDir(tmp_path), LogFilter(ranks=frozenset(range(3)))
    write(run, 0, "out", {10.0: "step 1\nste", 12.0: "p 2\n", 20.0: "step 3\n"})
    write(run, 0, "err", {11.0: "Traceback\n", 11.5: "ValueError: no\n"})
    write(run, 1, "out", {10.5: "of rank 1\n", 19.0: "last\n"})
    told = [
        (10.0, "step 1"),
        (10.5, "of rank 1"),
        (11.0, "Traceback"),
        (11.5, "ValueError: no"),
        (12.0, "step 2"),
        (19.0, "last"),
        (20.0, "step 3"),
    ]
    assert shown_lines(run, all_ranks) == told
    assert shown_lines(run, all_ranks, Span(11.0, 19.5)) == told[2:6]
    assert shown_lines(run, all_ranks, Span(None, 9.0)) == []
    assert shown_lines(run, all_ranks, Span(None, 1e12)) == told
    around = replace(all_ranks, grep=re.compile("ValueError"), before=2, after=1)
    # Lines of the same rank.
    assert [text for _, text in shown_lines(run, around)] == ["step 1", *(text for _, text in told[2:5])]
    assert [line.text for line in last_of(kept_chunks(run, all_ranks), all_ranks, 2)] == ["last", "step 3"]


def test_an_index_stays_small_and_keeps_the_newest_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.logs.times.LARGEST_INDEX", 2000)
    log, times, now = tmp_path / "rank-0.out", LogTimes(), time.time()
    log.write_bytes(b"x" * 1000)
    for number in range(1000):
        times.note(log, number + 1, 1000.0 - number)
    entries = entries_of(log)
    assert index_of(log).stat().st_size < 4000
    assert [end for _, end in entries[-20:]] == list(range(981, 1001))
    assert entries == sorted(entries)
    # Each file is synced while it is thinned, which takes time.
    assert all(abs(written - (now - 1001 + end)) < 60 for written, end in entries)


def test_a_log_without_an_index_has_the_time_of_its_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for node, rank, text in (("b", 1, b"one\n"), ("a", 0, b"zero\nno end")):
        LogKeeper.keep(run.log(node, rank, "out"), 0, text)
    everything = LogFilter(ranks=frozenset(range(9)))
    kept = [line for chunk in kept_chunks(run, everything) for line in chunk.lines()]
    assert [(line.rank, line.text) for line in kept] == [
        (1, "one"),
        (0, "zero"),
        (0, "no end"),
    ]
    assert last_lines(run.log("a", 0, "out"), 1) == ["no end"]


def test_ranks_are_read_or_refused() -> None:
    assert parse_ranks("0,8-10") == {0, 8, 9, 10}
    for bad in ("", "a", "3-1", "0-9999999", "-1"):
        with pytest.raises(UsageError, match="is not a rank"):
            parse_ranks(bad)
