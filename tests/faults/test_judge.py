"""The pure parts of the faults: what is drawn, what is judged, and the stand-in for the trainer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import fake_trainer, play
from tests.faults.draw import (
    KINDS,
    RUNNING,
    STEPS,
    STOP,
    Fault,
    draw,
    draw_interrupts,
    expected_end,
)
from tests.faults.field import Desk, Lane
from tests.faults.judge import (
    Row,
    Story,
    judge,
    one_attempt,
    steps_grow,
    table,
)
from tests.faults.seen import known_after

KILLED = Fault(1, "rank killed", RUNNING, 2, 9, 0.1, False)


# -- drawing -----------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_faults_and_another_seed_others() -> None:
    assert draw(1, 50) == draw(1, 50)
    assert draw(1, 50)[:20] == draw(1, 20)
    assert draw(1, 50) != draw(2, 50)
    assert [fault.number for fault in draw(3, 7)] == list(range(7))


def test_two_hundred_faults_hold_every_kind_at_each_of_its_moments() -> None:
    drawn = {(fault.kind, fault.phase) for fault in draw(1, 200)}
    assert drawn == {(name, phase) for name, kind in KINDS.items() for phase in kind.phases}
    real = [fault for fault in draw(1, 200) if fault.real]
    assert 8 <= len(real) <= 40
    assert all(KINDS[fault.kind].real and fault.rank < 2 for fault in real)


def test_a_fault_names_the_node_of_its_rank() -> None:
    assert [replace(KILLED, rank=rank).node for rank in range(4)] == ["node1", "node1", "node2", "node2"]
    assert [replace(KILLED, rank=rank, real=True).node for rank in range(2)] == ["node1", "node2"]
    assert [replace(KILLED, rank=rank).local for rank in range(4)] == [0, 1, 0, 1]


def test_every_fault_has_an_end_that_counts_and_a_stop_always_ends_stopped() -> None:
    for fault in (*draw(4, 200), *draw_interrupts(1, 20)):
        want = expected_end(fault)
        assert want.phases and want.attempts[0] <= want.attempts[1]
        assert fault.phase != STOP or want.phases == ("stopped",) or fault.kind == "Ctrl-C"


# -- judging -----------------------------------------------------------------------------------------------


def metric(event: str, step: int, **more: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "state": fake_trainer.state_at(step), **more}


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [metric("step", step) for step in range(first, last + 1)]


WHOLE = [
    metric("start", 0), *steps(1, 5), metric("checkpoint", 5), *steps(6, 8),
    metric("start", 5, resumed_from="/x/step-00000005"), *steps(6, STEPS), metric("end", STEPS),
]  # fmt: skip
WELL = Story(
    KILLED,
    phase="finished",
    attempt=2,
    steps=STEPS,
    reasons=("restart 1 of 6 now: rank 2 on node2 (device 0) killed (SIGKILL)",),
    codes={"launch": 0},
    metrics=WHOLE,
    struck=10.0,
    known=0.25,
    stopped=1.5,
)


def test_a_run_that_went_on_from_its_checkpoint_is_well_and_its_cause_right() -> None:
    verdict = judge(WELL)
    assert (verdict.well, verdict.cause, verdict.broken) == (True, True, ())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"phase": "failed"}, "the run is failed, not finished"),
        ({"phase": ""}, "not recorded"),
        ({"attempt": 4}, "4 attempts, not 2 to 2"),
        ({"codes": {"launch": 70}}, "`launch` ended with 70"),
        ({"codes": {"launch": 124}}, "`launch` ended with 124"),
        ({"output": "Traceback (most recent call last):\n  x"}, "a traceback on the user's screen"),
        ({"lost_lines": ("node1/rank-0.out of attempt 1: 5 of 9 bytes",)}, "5 of 9 bytes"),
    ],
)
def test_what_went_wrong_is_said(changes: Mapping[str, Any], says: str) -> None:
    verdict = judge(replace(WELL, **changes))
    assert not verdict.well
    assert any(says in one for one in verdict.broken), verdict.broken


def test_a_ranks_own_traceback_is_no_fault_and_another_rank_is_a_wrong_cause() -> None:
    quoted = "  | Traceback (most recent call last):\nnode1:0 Traceback (most recent call last):\n"
    assert judge(replace(WELL, output=quoted)).well
    other = ("restart 1 of 6 now: rank 3 on node2 (device 1) killed (SIGKILL)",)
    assert judge(replace(WELL, reasons=other)).cause is False


def test_a_rank_that_lives_on_beside_the_next_attempt_is_seen() -> None:
    scans = [(1.0, frozenset({(1, "node1"), (1, "node2")})), (9.0, frozenset({(1, "node2"), (2, "node1")}))]
    assert list(one_attempt(scans, KILLED, 0.0, 0.0)) == ["attempts 1, 2 lived at the same time"]
    frozen = replace(KILLED, kind="node frozen")
    # Nobody can reach it there.
    assert not list(one_attempt(scans, frozen, 5.0, 20.0))
    # It should be gone long ago.
    assert list(one_attempt([(99.0, scans[1][1])], frozen, 5.0, 20.0))


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ([*WHOLE[:8], metric("step", 8), *WHOLE[10:]], "step 8 followed step 6"),
        (
            [*WHOLE[:10], metric("start", 0), *steps(1, STEPS), metric("end", STEPS)],
            "though step 5 was saved",
        ),
        ([*WHOLE[:10], metric("start", 5), *WHOLE[11:]], "began at step 5 without a checkpoint"),
        ([*WHOLE[:11], metric("step", 6, state=7), *WHOLE[12:]], "does not follow from a correct checkpoint"),
        (WHOLE[:-1], f"finished at step {STEPS} of {STEPS}"),
        (WHOLE[:-3], f"finished at step {STEPS - 2} of {STEPS}"),
    ],
)
def test_steps_only_grow_but_for_declared_resumes(metrics: Sequence[Mapping[str, Any]], says: str) -> None:
    assert any(says in one for one in steps_grow(replace(WELL, metrics=metrics)))


def test_a_newest_checkpoint_may_be_lost_with_its_node_where_no_disk_is_shared() -> None:
    config = {"config": {"save": {"every": 5}}}
    behind = [metric("start", 0), *steps(1, 10), metric("checkpoint", 5), metric("checkpoint", 10)]
    behind += [metric("start", 5, resumed_from="x", **config), *steps(6, STEPS), metric("end", STEPS)]
    lost = replace(KILLED, kind="node killed", real=True)
    assert not list(steps_grow(replace(WELL, metrics=behind, fault=lost)))
    assert list(steps_grow(replace(WELL, metrics=behind)))


def test_a_ctrl_c_ends_with_130_and_writes_nothing_or_a_stopped_run() -> None:
    fault = draw_interrupts(1, 1)[0]
    assert judge(Story(fault, codes={"launch": 130})).well
    assert judge(Story(fault, codes={"launch": 130}, phase="stopped")).well
    assert not judge(Story(fault, codes={"launch": 0}, phase="finished")).well


def test_a_failure_is_known_when_the_history_has_it() -> None:
    events = [
        {"event": "node_ended", "state": "failed", "time": 5.0},
        {"event": "node_ended", "state": "finished", "time": 11.0},
        {"event": "failed", "time": 12.5},
        {"event": "node_ended", "state": "lost", "time": 13.0},
    ]
    assert known_after(events, 12.0) == 0.5
    assert known_after(events[:2], 12.0) is None
    assert known_after(events, 0.0) is None


def test_the_table_counts_by_kind_and_names_the_worst() -> None:
    worse = replace(WELL, known=0.75, stopped=3.0, left=("node1: sleep 600",), phase="failed")
    lines = table([Row.of(WELL), Row.of(worse)])
    assert [line.split("  ")[0] for line in lines[:3]] == ["fault", "rank killed", "all"]
    assert "0.50 s, 0.75 s" in lines[1] and lines[1].split()[-5:] == ["1", "of", "2", "1", "1"]
    assert "here: median 0.50 s, worst 0.75 s of 2 (at most 1 s)" in lines[3]
    assert lines[4] == "the others stopped after that: median 2.25 s, worst 3.00 s of 2 (at most 10 s)"


# -- waits that run out ------------------------------------------------------------------------------------


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> play.Play:
    """Return a play whose launch has said something, and that waits for moments only briefly."""
    monkeypatch.setattr(play, "COMES", 0.2)
    monkeypatch.setattr(Lane, "is_up", lambda lane, node: node == "node2")
    monkeypatch.setattr(Lane, "pids", lambda lane, node: {})
    played = object.__new__(play.Play)
    played.lane, played.fault, played.run, played.missed = object.__new__(Lane), KILLED, None, ""
    played.desk = Desk(tmp_path / "desk", tmp_path / "cluster.yaml")
    (played.desk.folder / "launch.err").write_text("start 4 ranks\nrank 0 compiles its library\n")
    return played


def test_a_wait_that_runs_out_says_for_what_and_the_last_lines(waiting: play.Play) -> None:
    with subprocess.Popen(["sleep", "60"]) as launch:
        try:
            with pytest.raises(
                play.NotPlayed, match=r"the pid in ranks/2\.json did not come within 0 s"
            ) as seen:
                waiting._strike(launch)
            assert "launch.err: rank 0 compiles its library" in str(seen.value)
            assert waiting._wait(launch, lambda: [7], "a number") == [7]
        finally:
            launch.kill()


def test_a_rank_that_compiles_for_longer_than_the_wait_is_named(
    waiting: play.Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.symlink_to("/bin/sleep")
    with subprocess.Popen(["sleep", "60"]) as launch, subprocess.Popen([compiler, "60"]) as compiling:
        monkeypatch.setattr(Lane, "pids", lambda lane, node: {1: launch.pid, 2: compiling.pid})
        try:
            with pytest.raises(play.NotPlayed, match="a rank on node2 has compiled for 0 s: build it with"):
                waiting._strike(launch)
        finally:
            launch.kill()
            compiling.kill()


def test_a_run_whose_rank_compiled_the_library_is_not_taken_for_well() -> None:
    note = "compiled the C++ library for this node in 61 s: /home/x"
    metrics = [{**WHOLE[0], "notes": ["corpus: 3 documents", note]}, *WHOLE[1:]]
    verdict = judge(replace(WELL, metrics=metrics))
    assert not verdict.well and note in verdict.broken[0] and "python -m native build" in verdict.broken[0]
    assert judge(replace(WELL, metrics=[{**WHOLE[0], "notes": []}, *WHOLE[1:]])).well


def test_a_launch_that_ends_before_the_moment_has_no_good_end(waiting: play.Play) -> None:
    with subprocess.Popen(["true"]) as launch:
        launch.wait()
        waiting._strike(launch)
    assert waiting.missed == "the launch ended with 0 before the fault could strike"
    verdict = judge(replace(WELL, missed=waiting.missed))
    assert (verdict.well, verdict.broken) == (False, (waiting.missed,))


def test_a_process_that_ended_before_a_busy_machine_struck_is_not_judged(waiting: play.Play) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    waiting.target = gone.pid
    with subprocess.Popen(["sleep", "60"]) as launch:
        try:
            with pytest.raises(play.NotPlayed, match="ended before"):
                waiting._signal(launch)
        finally:
            launch.kill()


# -- the stand-in ------------------------------------------------------------------------------------------


def test_the_stand_in_resumes_from_the_newest_checkpoint_that_verifies(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15, 20):
        fake_trainer.save(folder, step, fake_trainer.state_at(step), 0.0)
    assert [path.name for path in sorted(folder.iterdir())] == [f"step-{step:08d}" for step in (10, 15, 20)]
    assert fake_trainer.latest(folder)[:2] == (20, fake_trainer.state_at(20))
    content = folder / "step-00000020" / "state.json"
    content.write_bytes(content.read_bytes().replace(b"x", b"y", 1))
    assert fake_trainer.latest(folder)[0] == 15
    (folder / "step-00000015" / "manifest.json").write_text("{")
    assert fake_trainer.latest(folder)[0] == 10
    assert fake_trainer.latest(tmp_path / "none") == (0, 0, "")


def test_a_manifest_of_the_stand_in_says_what_the_trainers_does(tmp_path: Path) -> None:
    path = fake_trainer.save(tmp_path, 5, 1, 0.0)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], list(manifest["files"])) == (1, 5, ["state.json"])
    assert not list(tmp_path.glob(".tmp-*"))
