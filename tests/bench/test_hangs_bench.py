"""The drills of hangs: what is drawn, and how the causes of their runs are counted."""

from __future__ import annotations

import json
from collections import Counter

from bench.runs import hang_ways
from bench.runs.hangs import Drill, Outcome, draw, table


def test_each_way_comes_equally_often_with_both_programs_and_six_layouts() -> None:
    drills = draw(168, 1)
    assert draw(168, 1) == drills != draw(168, 2)
    assert len(hang_ways.WAYS) == 14
    assert set(Counter((drill.way, drill.program) for drill in drills).values()) == {6}
    for program in ("own", "foreign"):
        assert len({drill.layout for drill in drills if drill.program == program}) == 6
    assert {drill.rank for drill in drills} == {0, 1, 2, 3}


def test_the_table_counts_ranks_and_frames_and_shows_whom_wrong_causes_name() -> None:
    def outcome(way: str, rank: int | None, title: str) -> Outcome:
        return Outcome(Drill(way, "own", "data", 3, 100), rank, title, 30.0)

    right = "rank 3 on node2 (device 1) hung: 3 of 4 ranks wait in x, rank 3 (node2, device 1) is in `hang_lock` at y"
    others = "rank 3 hung: 3 of 4 ranks wait in `hang_lock` at y, rank 3 (node2, device 1) is in `f` at z"
    shown = table(
        [
            outcome("lock", 3, right),
            outcome("lock", 3, others),
            outcome("lock", None, ""),
            outcome("loop", 1, right),
        ]
    ).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in shown}
    assert rows["lock"] == ["3", "2", "1", "nobody", "1"]
    assert rows["loop"] == ["1", "0", "0", "rank", "1", "1"]
    assert rows["gil"] == ["0", "0", "0"]
    assert rows["all"] == ["4", "2", "1"]


def test_a_run_is_a_line_of_json() -> None:
    drill = Drill("link", "foreign", "pipeline", 2, 45)
    line = json.loads(Outcome(drill, 1, "rank 1 hung: ...", 30.04).line())
    assert (line["way"], line["rank"], line["named"]) == ("link", 2, 1)
    assert (line["rank_right"], line["frame_right"], line["seconds"]) == (False, False, 30.0)
