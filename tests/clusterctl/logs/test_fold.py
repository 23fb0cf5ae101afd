"""Equal lines of many ranks are shown once."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from clusterctl.logs.fold import fold_lines, ranks_text
from clusterctl.logs.lines import LogChunk
from clusterctl.logs.select import LogFilter

EVERYBODY = LogFilter(everybody=True)


def said(rank: int, *lines: str) -> LogChunk:
    return LogChunk(f"n{rank}", rank, "out", "".join(f"{line}\n" for line in lines).encode())


def folded(*chunks: LogChunk, fuzzy: bool = False, most: int = 100) -> list[tuple[str, str, int]]:
    found = fold_lines(chunks, EVERYBODY, fuzzy=fuzzy, most=most)
    return [(ranks_text(one.ranks), one.text, one.times) for one in found]


def test_a_line_is_said_once_with_its_ranks_and_others_stand_in_their_place() -> None:
    assert folded(
        said(0, "load", "step", "end"), said(1, "load", "warn", "end"), said(2, "load", "step", "end")
    ) == [
        ("0-2", "load", 3),
        ("0,2", "step", 2),
        ("1", "warn", 1),
        ("0-2", "end", 3),
    ]


def test_the_pieces_that_a_log_comes_in_do_not_matter() -> None:
    pieces = [said(0, "a", "x0"), said(0, "end"), said(1, "a", "x1"), said(1, "end")]
    assert folded(*pieces) == [("0-1", "a", 2), ("0", "x0", 1), ("1", "x1", 1), ("0-1", "end", 2)]


def test_a_line_that_is_said_again_counts_and_does_not_lead_back() -> None:
    assert folded(said(0, "a", "b", "a", "c")) == [("0", "a", 2), ("0", "b", 1), ("0", "c", 1)]


def test_lines_that_differ_in_numbers_are_one_when_asked() -> None:
    chunks = (
        said(0, "step 1 loss 3.25", "x"),
        said(1, "step 1 loss 3.5e-1", "x"),
        said(2, "same 7"),
        said(3, "same 7"),
    )
    assert len(folded(*chunks)) == 4
    assert folded(*chunks, fuzzy=True) == [("0-1", "step # loss #", 2), ("0-1", "x", 2), ("2-3", "same 7", 2)]


def test_what_is_filtered_out_is_not_folded_and_memory_is_bounded() -> None:
    wanted = LogFilter(everybody=True, grep=re.compile("b"))
    assert [one.text for one in fold_lines([said(0, "a", "b")], wanted)] == ["b"]
    assert folded(said(0, "a", "b"), said(1, "a", "b"), most=2) == [
        ("0", "a", 1),
        ("0", "b", 1),
        ("1", "a", 1),
        ("1", "b", 1),
    ]


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=8), max_size=5))
def test_nothing_is_lost_and_nothing_is_said_twice(ranks: list[list[str]]) -> None:
    found = folded(*[said(rank, *lines) for rank, lines in enumerate(ranks) if lines])
    assert sorted(text for _, text, _ in found) == sorted({line for lines in ranks for line in lines})
    assert sum(times for _, _, times in found) == sum(map(len, ranks))


def test_ranks_are_written_as_they_are_asked_for() -> None:
    assert ranks_text([3, 1, 2, 9]) == "1-3,9"
    assert ranks_text([0]) == "0"
