"""Lines out of bytes: progress bars, missing ends, endless lines, cut connections."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.errors import UsageError
from clusterctl.logs import (
    LONGEST_LINE,
    LineCutter,
    LogFilter,
    LogKeeper,
    LogLine,
    kept_lines,
    last_lines,
    parse_ranks,
)
from clusterctl.rundir import RunDir


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_lines_do_not_depend_on_how_the_bytes_were_cut(data: bytes, cuts: list[int]) -> None:
    whole = LineCutter()
    expected = whole.feed(data) + whole.end()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = LineCutter()
    got = [line for first, end in itertools.pairwise(edges) for line in parts.feed(data[first:end])]
    assert got + parts.end() == expected


def test_a_progress_bar_shows_its_last_state_and_bad_bytes_are_replaced() -> None:
    assert LineCutter().feed(b"10%\r50%\r100%\r\n\xff\n") == ["100%", "�"]


def test_a_line_without_end_is_shown_once_in_part_with_bounded_memory() -> None:
    cutter = LineCutter()
    shown = [line for _ in range(40) for line in cutter.feed(b"x" * 10_000)]
    shown += cutter.feed(b"tail\nnext\n")
    assert [len(line) for line in shown] == [LONGEST_LINE, 4]
    assert len(cutter.rest) <= LONGEST_LINE


def test_a_chunk_that_comes_twice_is_kept_once_and_a_gap_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a" / "rank-0.out"
    assert LogKeeper.keep(path, 0, b"hello ") == b"hello "
    assert LogKeeper.keep(path, 3, b"lo world") == b"world"
    assert path.read_bytes() == b"hello world"
    with pytest.raises(ValueError, match="never came"):
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


def test_kept_lines_come_rank_by_rank(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for node, rank, text in (("b", 1, b"one\n"), ("a", 0, b"zero\nno end")):
        LogKeeper.keep(run.log(node, rank, "out"), 0, text)
    everything = LogFilter(ranks=frozenset(range(9)))
    assert [(line.rank, line.text) for line in kept_lines(run, everything)] == [
        (0, "zero"),
        (0, "no end"),
        (1, "one"),
    ]
    assert last_lines(run.log("a", 0, "out"), 1) == ["no end"]


def test_ranks_are_read_or_refused() -> None:
    assert parse_ranks("0,8-10") == {0, 8, 9, 10}
    for bad in ("", "a", "3-1", "0-9999999", "-1"):
        with pytest.raises(UsageError):
            parse_ranks(bad)
