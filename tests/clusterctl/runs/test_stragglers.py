"""Ranks that hold up the others: from a heartbeat to a name, and nothing is done to them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterctl.agent.ranks.hangs import REPORTED, Steps, own_seconds
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Events
from clusterctl.runs.causes.blame import Observation
from clusterctl.runs.causes.places import Frame
from clusterctl.runs.causes.roll_call import Roll
from clusterctl.runs.controller import Control
from clusterctl.runs.overview import make_overview, read_progress
from clusterctl.runs.query import combine
from clusterctl.runs.state import RunState
from clusterctl.runs.watching import roller
from clusterctl.runs.watching.roller import Roller
from clusterctl.runs.watching.stall import IN_A_ROW, Stragglers, is_number, slow
from clusterctl.runs.watching.updates import Update
from clusterctl.transport.fanout import Connections
from tests.support.records import outcome, record_of
from tests.support.scripted import ScriptedTransport


def test_a_rank_is_slow_beside_the_median_and_not_beside_the_quickest() -> None:
    assert slow({0: 1.0, 1: 1.1, 2: 1.2, 3: 3.6}) == {3: pytest.approx(3.6 / 1.1)}
    assert slow({0: 0.2, 1: 1.0, 2: 1.1, 3: 1.2}) == {}, "a quick one makes no stragglers of the others"
    assert slow({0: 1.0, 1: 1.25}) == {}
    assert slow({0: 1.0, 1: 1.5}) == {1: 1.5}
    assert slow({0: 0.001, 1: 0.004}) == {}, "3 ms are no matter"
    assert slow({0: 1.0}) == slow({}) == slow({0: 0.0, 1: 0.0}) == {}


def test_a_straggler_is_named_once_after_so_many_words_of_its_node_and_only_when_all_were_heard() -> None:
    paces = Stragglers(ranks=4)
    a, b = {0: 0.1, 1: 0.1}, {2: 0.1, 3: 0.31}
    told = []
    for _ in range(6):
        assert paces.note(a) == []
        told.append([one.rank for one in paces.note(b)])
    assert told == [[]] * (IN_A_ROW - 1) + [[3]] + [[]] * (6 - IN_A_ROW)


def test_bad_luck_once_makes_no_straggler() -> None:
    paces, told = Stragglers(ranks=2), []
    for seconds in (3.0, 3.0, 1.0, 3.0, 3.0, 1.0, 3.0):
        told += paces.note({0: 1.0, 1: seconds})
    assert told == []


def test_its_words_say_where_it_is_and_how_slow() -> None:
    paces = Stragglers(ranks=3)
    (one,) = [found for _ in range(IN_A_ROW) for found in paces.note({0: 0.1, 1: 0.1, 2: 0.31})]
    assert one.describe("node2", 5) == (
        "straggler: rank 2 on node2 (device 5) takes 3.1 times as long for its part of a step as the others"
        " (0.31 s, they 0.1 s)"
    )


def test_a_node_tells_what_its_ranks_took_themselves_and_forgets_it_then(tmp_path: Path) -> None:
    steps = Steps(str(tmp_path), [4, 5], None, 0.0)
    assert steps.pace(REPORTED) is None
    for number in range(1, 5):
        (tmp_path / "rank-4").write_text(f"{number}     0.2000\n")
        (tmp_path / "rank-5").write_text(f"{number}     0.0500\n")
        steps.find_hung(float(number))
    assert steps.pace(REPORTED - 1.0) is None, "too soon"
    assert steps.pace(REPORTED) == {"4": 0.2, "5": 0.05}
    assert steps.pace(3 * REPORTED) is None, "nothing new was seen"


def test_a_straggler_of_any_node_is_found_and_a_node_speaks_for_its_own_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(Roller, "report_slow", lambda looker, node, rank: seen.append((node, rank)))
    looker = Roller.__new__(Roller)
    run = RunDir(tmp_path / "r")
    ranks, devices = {"a": [0, 1], "b": [2]}, {"a": [4, 5], "b": [7]}
    run.write_record(record_of(ranks, devices))
    control = Control.__new__(Control)
    control.run = run
    paces, told = Stragglers(ranks=3), []
    for _ in range(IN_A_ROW):
        told += control._stragglers(paces, Update(node="b", pace={2: 0.9, 0: 99.0, 17: 1.0}), looker)
        told += control._stragglers(paces, Update(node="a", pace={0: 0.1, 1: 0.1}), looker)
    assert [one.node for one in told] == ["b"]
    assert seen == [("b", 2)], "one look"
    (event,) = run.event_lines()
    assert tuple(event.facts[name] for name in ("node", "rank", "device", "times")) == ("b", 2, 7, 9.0)


@pytest.mark.parametrize(
    ("function", "file", "text"),
    [
        ("load", "/n/code/data.py", "rank 2 is in `load` at code/data.py:5 in 5 of 5 samples"),
        (
            "all_reduce",
            "/v/lib/python3.11/site-packages/torch/distributed/c10d.py",
            "rank 2 waits in all_reduce at code/data.py:5 in 5 of 5 samples: another rank holds it up",
        ),
    ],
)
def test_a_look_at_a_straggler_shows_whether_it_waits_itself(
    tmp_path: Path, function: str, file: str, text: str
) -> None:
    run = RunDir(tmp_path / "r")
    run.write_record(record_of({"a": [0, 1], "b": [2]}))
    own = {"function": "load", "file": "/n/code/data.py", "line": 5}
    frames = [{"function": function, "file": file, "line": 5}, own]
    script = ScriptedTransport({("b", "roll_call"): {"ranks": [{"rank": 2, "pid": 7, "frames": frames}]}})
    reports: list[str] = []
    with Connections(script) as connections:
        Roller(run, connections, (), reports.append).report_slow("b", 2)
        deadline = time.monotonic() + 60
        while not reports and time.monotonic() < deadline:
            time.sleep(0.01)
    assert reports == [f"straggler: {text}"]
    assert {params["only"] for _, _, params in script.asked} == {2}


def test_a_straggler_that_works_in_two_looks_of_five_does_not_count_as_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "r")
    run.write_record(record_of({"a": [0]}))
    site = "/v/lib/python3.11/site-packages/torch/distributed/c10d.py"
    own = Frame("load", "/n/code/data.py", 5)
    waits, works = (Frame("recv", site, 1), own), (own,)
    looks = iter([waits, works, waits, works, waits])
    monkeypatch.setattr(
        roller, "call_roll", lambda *given, **how: Roll((Observation(0, pid=7, frames=next(looks)),))
    )
    reports: list[str] = []
    with Connections(ScriptedTransport({})) as connections:
        Roller(run, connections, (), reports.append).report_slow("a", 0)
        deadline = time.monotonic() + 60
        while not reports and time.monotonic() < deadline:
            time.sleep(0.01)
    assert reports == ["straggler: rank 0 is in `load` at code/data.py:5 in 2 of 5 samples"]


def test_of_a_program_that_tells_steps_alone_these_count() -> None:
    assert own_seconds("12     0.2500\npause") == 0.25
    assert own_seconds("12\n") is own_seconds("") is own_seconds("12 soon") is None


def answered() -> RunState:
    record = record_of({"a": [0, 1], "b": [2]}, {"a": [4, 5], "b": [4]})
    ranks = [{"rank": number, "state": "running"} for number in (0, 1, 2)]
    said = {"node": {"state": "running"}, "heartbeats": {"0": {"text": "7     0.1000", "age": 0.1}}}
    a = {**said, "ranks": ranks[:2], "pace": {"0": 0.1, "1": 0.3}}
    b = {**said, "ranks": ranks[2:], "pace": {"2": 0.1}}
    return combine(record, [outcome("a", a), outcome("b", b)], None)


def test_status_shows_it_while_it_is_so() -> None:
    state = answered()
    assert state.ranks[0].step == 7
    assert [rank.step_seconds for rank in state.ranks] == [0.1, 0.3, 0.1]
    record = record_of({"a": [0, 1], "b": [2]})
    one = make_overview(record, state, read_progress([]), Events(()), 1.0)
    assert one.slow == {1: pytest.approx(3.0)}


@pytest.mark.parametrize("value", [None, "0.1", True, [1], float("nan"), float("inf"), -1])
def test_what_is_no_time_is_none(value: object) -> None:
    assert not is_number(value)
