"""`status`: ages, restarts, the ranks of each node, and what happened, out of values."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from clusterctl.cli.views import run_status
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_lines import Event, Events, read_event, read_metric
from clusterctl.runs import overview
from clusterctl.runs.causes.cause import Cause
from clusterctl.runs.overview import make_overview, read_progress
from clusterctl.runs.query import _with_step
from clusterctl.runs.state import Heartbeat, RankState
from tests.support.records import rank_of, record_of, state_of

RECORD = record_of({"a": [0, 1], "b": [2, 3]}, run="demo-1", attempt=2, created=100.0)
METRICS = [
    {"event": "start", "time": 101.0},
    {
        "event": "step",
        "step": 9,
        "steps": 100,
        "loss": 3.25,
        "tokens_per_second": 1200.0,
        "step_seconds": 0.5,
        "time": 150.0,
    },
    {"event": "checkpoint", "step": 5, "path": "x", "time": 140.0},
]
EVENTS = (
    {"time": 100.0, "event": "planned", "ranks": 4, "attempt": 1},
    {"time": 101.0, "event": "started", "ranks": 4, "attempt": 1, "nodes": ["a", "b"]},
    {"time": 120.0, "event": "node_ended", "node": "b", "state": "lost"},
    {"time": 121.0, "event": "restart", "why": "restart 1 of 3 in 2 s: lost b", "wait": 2.0},
    {"time": 123.0, "event": "started", "ranks": 4, "attempt": 2, "nodes": ["a", "b"]},
    {"time": 124.0, "event": "new_kind", "node": "b"},
)
LINES = [metric for line in METRICS if (metric := read_metric(line))]
HISTORY = tuple(event for line in EVENTS if (event := read_event(line)))


def rank(number: int, node: str, **more: Any) -> RankState:
    facts = {"rank": number, "node": node, "device": 0, "pid": 40 + number, "state": "running"}
    return rank_of({**facts, **more})


def seen(**more: Any) -> overview.Overview:
    ranks = (
        rank(0, "a", step=9, step_age=1.0),
        rank(1, "a", step=8, step_age=4.0),
        rank(2, "b", state="exited", exit_code=1, signal=None),
    )
    state = state_of({"a": "running", "b": "running"}, ranks, controller=7, **more)
    return make_overview(RECORD, state, read_progress(LINES), Events(HISTORY), 160.0)


def text_of(one: overview.Overview) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(run_status.whole(one))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_where_a_run_is_is_told_with_ages() -> None:
    one = seen()
    assert (one.step, one.steps, one.loss, one.tokens_per_second) == (9, 100, 3.25, 1200.0)
    assert (one.attempt, one.restarts, one.controller, one.age) == (2, 1, 7, 60.0)
    assert (one.checkpoint_step, one.checkpoint_age) == (5, 20.0)
    assert one.step_age == 4.0, "by the nodes' own clocks, of the rank that is furthest behind"
    assert one.left == 91 * 0.5


def test_each_node_has_its_ranks_by_state_and_its_slowest() -> None:
    a, b = seen().nodes
    assert (a.ranks, a.step, a.slowest, a.step_age) == ({"running": 2}, 8, 1, 4.0)
    assert (b.ranks, b.step) == ({"failed": 1, "unknown": 1}, None), "rank 3 has not been heard of"


def test_a_programs_last_step_is_as_old_as_its_metrics_where_no_heart_beats() -> None:
    state = state_of({"a": "unknown"}, phase="running", unreachable={"a": "no answer"})
    one = make_overview(RECORD, state, read_progress(LINES), Events(()), 160.0)
    assert one.step_age == 10.0 and one.nodes[0].reason == "no answer"
    assert "a: no answer; the run counts as lost after" in text_of(one)
    assert "clusterctl resume demo-1 --nodes SET" in text_of(one)
    assert make_overview(RECORD, state, read_progress([]), Events(()), 90.0).age == 0.0


def test_events_are_said_in_words_with_their_reasons_and_unknown_ones_with_their_facts() -> None:
    assert [one["text"] for one in seen().as_json()["events"]] == [
        "attempt 1 started: 4 ranks",
        "b: lost",
        "restart 1 of 3 in 2 s: lost b",
        "attempt 2 started: 4 ranks",
        "new_kind node=b",
    ]
    assert overview.event_text(Event(1.0, "ended", {"phase": "failed", "verdict": "do not requeue"})) == (
        "ended: failed; do not requeue"
    )
    assert overview.event_text(Event(1.0, "failed", {"node": "a", "rank": 3})) == "rank 3 on a failed"
    assert overview.event_text(Event(1.0, "failed", {"node": "a"})) == "failed node=a"
    one_rank = Event(1.0, "started", {"attempt": 1, "ranks": 1})
    assert overview.event_text(one_rank) == "attempt 1 started: 1 rank"


def test_a_person_sees_it_all_and_who_looks_after_it() -> None:
    shown = text_of(seen())
    for part in (
        "attempt 2  1 restart  step 9/100  loss 3.2500  1.2k tokens/s",
        "last step 4s ago  checkpoint of step 5 20s ago  46s left",
        "1 failed, 1 unknown",
        "exited with code 1",
        "restart 1 of 3 in 2 s: lost b",
    ):
        assert part in shown, shown
    alone = text_of(
        make_overview(RECORD, state_of({}, phase="running"), read_progress([]), Events(()), 160.0)
    )
    assert "no controller; start one with: clusterctl attach demo-1" in alone


def test_a_program_without_steps_has_no_columns_about_steps() -> None:
    ranks = (rank(0, "a"), rank(1, "b"))
    state = state_of({"a": "running", "b": "running"}, ranks, controller=7)
    text = text_of(make_overview(RECORD, state, read_progress([]), Events(()), 160.0))
    assert "RANK" in text and "PID" in text and "STEP" not in text and "AGE" not in text
    assert "STEP" in text_of(seen()) and "AGE" in text_of(seen())


def test_of_many_ranks_those_are_shown_that_are_not_as_the_others() -> None:
    killed = rank(40, "a", state="exited", signal=9, exit_code=None)
    ranks = (*[rank(number, "a") for number in range(40)], killed)
    one = make_overview(RECORD, state_of({"a": "running"}, ranks), read_progress([]), Events(()), 1.0)
    assert "SIGKILL" in text_of(one) and " 17 " not in text_of(one)


def test_an_end_that_nobody_saw_is_no_success() -> None:
    gone = rank(0, "a", state="exited", exit_code=None, signal=None)
    one = make_overview(RECORD, state_of({"a": "stopped"}, (gone,)), read_progress([]), Events(()), 1.0)
    assert one.nodes[0].ranks == {"ended unseen": 1, "unknown": 1} and "ended unseen" in text_of(one)


def test_a_rank_that_was_asked_to_end_is_stopped_and_not_failed() -> None:
    ends = [
        {"exit_code": 0, "signal": None},
        {"exit_code": None, "signal": 15},
        {"exit_code": None, "signal": 9},
    ]
    states = [overview.state_of_rank(rank(0, "a", state="exited", **end)) for end in ends]
    assert states == ["finished", "stopped", "failed"]


def test_a_rank_that_hung_is_told_so_though_it_was_ended_by_a_signal() -> None:
    hung = rank(3, "b", state="exited", exit_code=None, signal=15, hang=61.0, silent=True)
    one = make_overview(RECORD, state_of({"b": "failed"}, (hung,)), read_progress([]), Events(()), 1.0)
    assert one.nodes[0].ranks == {"hung": 1, "not started": 1}, (
        "its supervisor told how all that it began ended"
    )
    assert "hung: no rank wrote a line for 61 s" in text_of(one)


def test_a_new_line_is_said_when_anything_but_an_age_differs() -> None:
    later = make_overview(RECORD, state_of({"a": "running"}), read_progress(LINES), Events(HISTORY), 500.0)
    same = make_overview(RECORD, state_of({"a": "running"}), read_progress(LINES), Events(HISTORY), 160.0)
    assert run_status.changes(later) == run_status.changes(same) != run_status.changes(seen())
    assert "demo-1  running  attempt 2  1 restart  step 9/100" in run_status.line(same)


def test_a_rank_that_holds_up_the_others_is_shown_also_of_many() -> None:
    ranks = tuple(rank(number, "a", step_seconds=0.4 if number == 31 else 0.1) for number in range(40))
    one = make_overview(RECORD, state_of({"a": "running"}, ranks), read_progress([]), Events(()), 1.0)
    assert "running, straggler: 4.0x slower than the others" in text_of(one)
    assert one.as_json()["slow"] == {"31": 4.0}


def test_an_ended_run_says_its_root_cause_what_to_try_and_where_to_look() -> None:
    cause = Cause("rank 3 on b (device 1) killed", others="3 other ranks ended", hint="look", log="/x")
    one = replace(seen(), phase=Phase.FAILED, cause=cause)
    assert (
        "root cause: rank 3 on b (device 1) killed\n  3 other ranks ended\n  try: look\n  log: /x"
        in text_of(one)
    )


def test_a_heartbeat_without_a_number_has_no_step() -> None:
    plain = rank(0, "a")
    for text in ("12     0.2500", "12"):
        assert _with_step(plain, Heartbeat(text, 0.5)) == replace(plain, step=12, step_age=0.5)
    for text in ("", "starting", "-1", "\u0663", "9" * 30):
        assert _with_step(plain, Heartbeat(text, 0.5)) is plain
    assert _with_step(plain, None) is plain


def test_damaged_lines_of_the_history_are_counted() -> None:
    shown = make_overview(RECORD, state_of({"a": "running"}), read_progress([]), Events(HISTORY, 2), 160.0)
    assert "2 lines of events.jsonl could not be read" in text_of(shown)
