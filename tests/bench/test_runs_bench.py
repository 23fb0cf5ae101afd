"""The arithmetic behind bench/runs/recover.py, goodput.py and idle.py."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.runs import code, field, hangs, idle, recover, slurm, stops
from bench.runs import goodput as goodputs
from bench.runs.times import (
    durations,
    goodput,
    middle,
    recovered,
)


def start(time: float, step: int, seconds: float = 2.0) -> dict[str, Any]:
    return {
        "event": "start",
        "time": time,
        "step": step,
        "startup": {"python": 0.5, "libraries": seconds - 0.5},
    }


def steps(time: float, first: int, last: int, each: float = 1.0) -> list[dict[str, Any]]:
    """Steps that take a second each, the first of them done at `time`."""
    return [
        {"event": "step", "time": time + each * (number - first), "step": number, "step_seconds": each}
        for number in range(first, last + 1)
    ]


def test_a_step_that_is_done_again_is_not_the_return() -> None:
    metrics = [start(10, 0), *steps(11, 1, 7), start(25, 4), *steps(26, 5, 9)]
    back = recovered(metrics, killed=17.5)
    assert back is not None
    # Step 8; 5 to 7 had been done.
    assert (back.new_step, back.began, back.starts) == (29.0, 23.0, 1)
    assert back.parts == {"python": 0.5, "libraries": 1.5}


def test_a_start_that_came_to_nothing_is_counted_and_its_time_too() -> None:
    metrics = [start(10, 0), *steps(11, 1, 7), start(25, 4), *steps(26, 5, 6), start(40, 4), *steps(41, 5, 8)]
    back = recovered(metrics, killed=17.5)
    assert back is not None
    assert (back.new_step, back.starts) == (44.0, 2)


def test_a_training_that_has_not_come_back_says_nothing() -> None:
    metrics = [start(10, 0), *steps(11, 1, 7), start(25, 4), *steps(26, 5, 7)]
    assert recovered(metrics, killed=17.5) is None
    assert recovered(metrics, killed=60.0) is None


def test_moments_are_told_as_the_seconds_between_them() -> None:
    assert durations(10.0, {"known": 10.5, "ended": 12.0}) == {"known": 0.5, "ended": 1.5}


def test_the_middle_of_parts_is_of_those_that_every_turn_has() -> None:
    assert middle([{"a": 1.0, "b": 9.0}, {"a": 3.0}, {"a": 2.0, "b": 1.0}]) == {"a": 2.0}
    assert middle([]) == {}


def test_goodput_counts_each_step_once() -> None:
    saved = {"event": "checkpoint", "time": 20.0, "step": 4, "seconds": 0.5}
    metrics = [start(10, 0), *steps(11, 1, 7), saved, start(25, 4), *steps(26, 5, 9)]
    found = goodput(metrics, 0.0, 40.0)
    assert (found.steps, found.counted, found.again, found.saving) == (9, 9.0, 3.0, 0.5)
    assert found.share == pytest.approx(9 / 40)
    assert found.idle == pytest.approx(27.5)


def test_the_report_of_goodput_says_how_each_kind_was_got_over() -> None:
    metrics = [start(10, 0), *steps(11, 1, 7), start(25, 4), *steps(26, 5, 99, each=0.5)]
    faults = [goodputs.Fault("rank killed", "rank 1 on node1", 17.5)]
    said = goodputs.report(goodput(metrics, 10.0, 75.0), faults, metrics, 1)
    assert "rank killed" in said
    # To step 8, half a second each from 26.0 on.
    assert "10.0 s" in said
    assert said.endswith("goodput 79.2 %; at least 70 %: reached")


def test_one_fault_falls_into_each_interval() -> None:
    found = goodputs.moments(random.Random(1), 300.0, 60.0)
    assert [int(moment // 60) for moment in found] == [0, 1, 2, 3, 4]
    assert all(6 <= moment % 60 <= 54 for moment in found)


def test_the_report_of_a_recovery_shows_ours_in_parts_of_theirs() -> None:
    ours = recover.Turn(4.0, 3.0, 1, {recover.TO_BEGIN: 1.0, "libraries": 1.5}, {"the death is noticed": 0.1})
    theirs = recover.Turn(8.0, 6.0, 2, {recover.TO_BEGIN: 4.0, "libraries": 1.5}, {})
    lines = recover.report({"clusterctl": [ours], "torchrun": [theirs]}).splitlines()
    assert lines[1].split() == ["launch", "to", "the", "first", "step", "4.00", "8.00", "0.50"]
    assert lines[2].split()[-3:] == ["3.00", "6.00", "0.50"]
    assert lines[4].split() == ["the", "death", "is", "noticed", "0.10"]
    assert lines[-1].split()[-3:] == ["1", "2", "0.50"]


def test_a_tool_that_never_came_back_has_no_column() -> None:
    ours = recover.Turn(4.0, 3.0, 1, {recover.TO_BEGIN: 1.0}, {})
    said = recover.report({"clusterctl": [ours], "torchrun": [ours], "torchrun, stock": []})
    assert "stock" not in said


def test_what_is_awaited_in_vain_ends_the_wait() -> None:
    with pytest.raises(field.TooLate, match="a step: not within"):
        field.wait_for("a step", lambda: False, limit=0.05)


def test_a_file_that_grows_gives_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert field.json_lines(path) == []
    path.write_text('{"step": 1}\n{"ste')
    assert field.json_lines(path) == [{"step": 1}]


def test_memory_is_read_as_the_kernel_writes_it() -> None:
    text = "55d0-7ffe ---p 00 00:00 0 [rollup]\nRss: 2048 kB\nPrivate_Clean: 256 kB\nPrivate_Dirty: 768 kB\n"
    assert idle.memory_of(text) == {"Rss": 2048, "Private": 1024}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        *[(stops, f"--count {count}") for count in ("0", "-1", "many", "9999999")],
        *[(stops, f"--count 4 {words}") for words in ("--faulty 5", "--nodes 0", "--limit nan")],
        *[(hangs, words) for words in ("--count 0", "--count -3", "--hang-after -1", "--ways")],
        *[(goodputs, words) for words in ("--minutes 0", "--every -5")],
        (recover, "--runs 0"),
        (slurm, "--rounds 0"),
        (code, "--files 0"),
        (idle, "--seconds -1"),
    ],
)
def test_counts_that_measure_nothing_are_refused(
    program: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *words.split()])
    with pytest.raises(SystemExit) as left:
        program.main()
    assert left.value.code == 2 and "error: " in capsys.readouterr().err
