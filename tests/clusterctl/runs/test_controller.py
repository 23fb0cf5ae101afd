"""What follows a failure: the policy as a value, and a controller that carries it out on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.ranks.hangs import LEAST, PAUSE, Pace, Stopped, is_stopped
from clusterctl.cli.views.run_status import head
from clusterctl.errors import ClusterctlError, InputFaults, Unreachable
from clusterctl.inventory.cluster import Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import Abandoned
from clusterctl.jobs.restarts import (
    Decision,
    Failure,
    History,
    Restart,
    decide,
    membership,
)
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.report.summary import read_sources, summary_of
from clusterctl.runs import start as runs
from clusterctl.runs.causes.cause import read_cause
from clusterctl.runs.controller import Control
from clusterctl.runs.in_charge import following
from clusterctl.runs.overview import summarise
from clusterctl.runs.query import current_state, log_in, query_nodes
from clusterctl.runs.state import RunState, read_state
from clusterctl.runs.stop import stop_run
from clusterctl.runs.watching.kept_watch import ControllerGone, KeptWatch
from clusterctl.runs.watching.watch import RunWatcher
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, Stream
from clusterctl.transport.local import LocalTransport
from tests.clusterctl.runs.test_run import lab, launched, left_of, program, wait_for
from tests.support.records import record_of
from tests.support.scripted import ScriptedTransport

POLICY = Restart(max=5, backoff=10.0)


def after(policy: Restart, *failures: Failure) -> list[Decision]:
    """The decisions on failures, one after the other."""
    history, made = History(), []
    for failure in failures:
        made.append(decide(policy, history, failure))
        history = made[-1].history
    return made


def died(step: int, **more: object) -> Failure:
    return Failure("rank 3 on node2 killed", step=step, trains=True, **more)  # type: ignore[arg-type]


# -- the policy --------------------------------------------------------------------------------------------


def test_a_run_that_gets_on_is_restarted_as_often_as_allowed() -> None:
    made = after(POLICY, *(died(step) for step in (10, 20, 30, 40, 50, 60)))
    assert [one.again for one in made] == [True] * 5 + [False]
    assert [one.wait for one in made[:5]] == [0.0] * 5
    assert made[0].why == "restart 1 of 5 now: rank 3 on node2 killed"
    assert made[5].why == "not restarted: all 5 restarts are used"
    only = after(replace(POLICY, max=1), died(10), died(20))
    assert only[1].why == "not restarted: the only restart is used"


def test_three_restarts_without_a_new_step_end_the_run() -> None:
    made = after(POLICY, *(died(7) for _ in range(4)))
    assert [one.again for one in made] == [True, True, True, False]
    assert [one.wait for one in made[:3]] == [0.0, 10.0, 20.0]
    assert made[1].why == "restart 2 of 5 in 10 s: rank 3 on node2 killed"
    assert made[3].why.startswith("do not requeue: 3 restarts brought no new step; the last failure: rank 3")


def test_a_new_step_between_makes_patient_again() -> None:
    made = after(Restart(max=9, backoff=10.0), *(died(step) for step in (7, 7, 7, 12, 12, 12, 12)))
    assert [one.wait for one in made[:4]] == [0.0, 10.0, 20.0, 0.0]
    assert [one.again for one in made] == [True] * 6 + [False]


def test_a_node_that_has_to_come_back_is_given_the_time() -> None:
    made = after(Restart(max=9, backoff=10.0), *(died(7, awaited=True) for _ in range(3)))
    assert [one.wait for one in made] == [10.0, 20.0, 40.0]


def test_a_wait_grows_to_five_minutes_and_no_further() -> None:
    assert decide(Restart(max=9, backoff=200.0), History(1, 1, 7), died(7)).wait == 300.0


@pytest.mark.parametrize(
    "failure",
    [
        Failure("x", trains=True, exit_code=2),
        Failure("x", exit_code=1, log="Traceback\nModuleNotFoundError: No module named 'megatron'"),
        Failure("x", exit_code=1, log="  File 'x.py'\nSyntaxError: invalid syntax"),
        Failure("x", exit_code=127, log="clusterctl: cannot start 'trian'"),
        Failure("x", exit_code=2, log="python: can't open file '/x/tain.py'"),
    ],
)
def test_a_users_mistake_is_not_restarted(failure: Failure) -> None:
    assert not after(POLICY, failure)[0].again
    # It had run before: the cause is another one.
    assert decide(POLICY, History(restarts=1), failure).again


@pytest.mark.parametrize(
    "failure",
    [
        Failure("lost node2", trains=True),
        Failure("killed", exit_code=None),
        Failure("x", exit_code=1, log="RuntimeError: NCCL error"),
        Failure("x", trains=True, exit_code=1, passes="the link may be up then"),
        Failure("x", trains=True, exit_code=1, step=3),
    ],
)
def test_what_may_go_well_the_next_time_is_restarted(failure: Failure) -> None:
    assert after(POLICY, failure)[0].again


def test_what_may_pass_is_started_again_after_a_pause_and_said() -> None:
    first = Failure("rank 3 failed: EI0006", trains=True, exit_code=1, passes="the link may be up then")
    made = after(POLICY, first, first, replace(first, step=4))
    assert [one.wait for one in made] == [10.0, 10.0, 0.0]
    why = "restart 1 of 5 in 10 s, because the link may be up then: rank 3 failed: EI0006"
    assert made[0].why == why


def test_a_taken_port_is_replaced_three_times_also_without_restarts() -> None:
    taken = Failure("rank 0 failed", trains=True, exit_code=1, port_taken=True)
    made = after(Restart(max=0), taken, taken, taken, taken)
    assert [one.again for one in made] == [True, True, True, False]
    assert {one.history.restarts for one in made} == {0}
    assert not after(Restart(max=0), replace(taken, step=4))[0].again


def test_a_stop_and_a_job_without_the_word_are_not_restarted() -> None:
    assert decide(POLICY, History(), died(5, stopped=True)) == Decision(False, "", history=History(0, 0, 5))
    assert not decide(Restart(max=0), History(), died(5)).again


def test_a_program_without_steps_gets_on_by_running_long() -> None:
    short, long = Failure("killed", seconds=5.0), Failure("killed", seconds=400.0)
    assert [one.again for one in after(POLICY, short, short, long, short, short)] == [True] * 5
    assert [one.again for one in after(POLICY, short, short, short, short)] == [True, True, True, False]


# -- the nodes of the next attempt -------------------------------------------------------------------------

NODES = [Node(f"n{number}", f"h{number}", f"10.0.0.{number}") for number in range(6)]


def names(chosen: tuple[list[Node], list[Node]]) -> tuple[str, str]:
    return " ".join(node.name for node in chosen[0]), " ".join(node.name for node in chosen[1])


def test_a_spare_stands_where_the_lost_node_stood() -> None:
    chosen = membership(NODES[:3], NODES[3:5], {"n1"}, None, lambda nodes: True)
    assert names(chosen) == ("n0 n3 n2", "n4")


def test_a_lost_spare_is_passed_over() -> None:
    assert names(membership(NODES[:3], NODES[3:5], {"n0", "n3"}, None, lambda nodes: True)) == (
        "n4 n1 n2",
        "",
    )


def test_without_spares_as_many_nodes_as_fit_serve_and_the_rest_stand_by() -> None:
    chosen = membership(NODES, [], {"n2"}, 2, lambda nodes: len(nodes) % 2 == 0)
    assert names(chosen) == ("n0 n1 n3 n4", "n5")


def test_where_fewer_are_not_allowed_the_same_nodes_have_to_come_back() -> None:
    assert names(membership(NODES[:2], [], {"n1"}, None, lambda nodes: True)) == ("n0 n1", "")
    assert names(membership(NODES[:3], [], {"n1"}, 2, lambda nodes: False)) == ("n0 n1 n2", "")


def test_a_node_that_is_there_again_joins_at_the_end_up_to_the_number_that_the_run_began_with() -> None:
    def chosen(nodes: list[Node], spares: list[Node], lost: str = "", even: bool = False) -> tuple[str, str]:
        return names(
            membership(nodes, spares, {lost}, 1, lambda those: not even or len(those) % 2 == 0, full=4)
        )

    assert chosen(NODES[:3], NODES[3:6]) == ("n0 n1 n2 n3", "n4 n5")
    assert chosen(NODES[:4], NODES[4:6]) == ("n0 n1 n2 n3", "n4 n5"), "never more than that"
    assert chosen(NODES[:3], NODES[3:5], "n1") == ("n0 n3 n2 n4", "")
    assert chosen(NODES[:2], NODES[2:3], even=True) == ("n0 n1", "n2"), "three do not fit"
    assert chosen(NODES[:2], NODES[2:4], "n3") == ("n0 n1 n2", "")


# -- a rank's pace -----------------------------------------------------------------------------------------


def paced(*seconds: float) -> Pace:
    pace, clock = Pace(0.0), 0.0
    pace.note(1, "0", clock)
    for step, one in enumerate(seconds, start=1):
        clock += one
        pace.note(int(clock * 1e9) + 1, str(step), clock)
    return pace


def test_silence_is_a_hang_after_three_times_the_usual_and_half_a_minute_at_least() -> None:
    # Too little is known.
    assert paced(1, 1).limit(None) == PAUSE
    assert paced(*[1.0] * 20).limit(None) == LEAST
    assert paced(*[20.0] * 20).limit(None) == pytest.approx(60.0)
    assert paced(*[1.0] * 20).limit(5.0) == 5.0


def test_steps_that_pass_between_two_looks_are_known_too() -> None:
    pace = Pace(0.0)
    pace.note(1, "100", 0.0)
    assert pace.limit(5.0) == PAUSE
    pace.note(10**9, "140", 1.0)
    assert pace.limit(5.0) == 5.0
    assert pace.limit(None) == LEAST


def test_a_checkpoint_may_take_its_time() -> None:
    pace = paced(*[1.0] * 20)
    pace.note(21 * 10**9, "21\npause", 30.0)
    assert pace.limit(None) == PAUSE
    assert pace.limit(5.0) == PAUSE
    pace.note(111 * 10**9, "22\n", 120.0)
    # What the pause took is no step's time.
    assert max(pace.times) < 2


# -- the job's words ---------------------------------------------------------------------------------------


def test_all_faults_of_a_restart_part_come_at_once(tmp_path: Path) -> None:
    text = "command: [a]\nrestart:\n  max: -1\n  backof: 3\n  backoff: soon\n  min_nodes: 0\n  node_lost_after: 5s\n"
    text += "  grow: never\n"
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InputFaults) as caught:
        jobs.load(tmp_path / "job.yaml")
    said = str(caught.value)
    for part in (
        ":3 restart.max",
        "'backof'",
        ":5 restart.backoff",
        ":6 restart.min_nodes",
        ":7 restart.node_lost",
        ":8 restart.grow",
    ):
        assert part in said


def test_a_restart_part_is_read_and_kept_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "command: [a]\nhang_after: 2m\n"
        "restart: {max: 2, backoff: 1m, spare_nodes: n5, min_nodes: 1, grow: checkpoint}\n"
    )
    job = jobs.load(tmp_path / "job.yaml")
    assert job.restart == Restart(max=2, backoff=60.0, spare_nodes="n5", min_nodes=1, grow="checkpoint")
    assert job.hang_after == 120.0


# -- a controller at work ----------------------------------------------------------------------------------


@pytest.fixture
def connections() -> Iterator[Connections]:
    with Connections(LocalTransport()) as opened:
        yield opened


def controlled(run: RunDir, connections: Connections) -> RunState:
    with run.hold() as ours:
        assert ours
        for _ in Control(run, connections, lines=False):
            pass
    state = read_state(run)
    assert state is not None
    return state


def said(run: RunDir) -> str:
    return "\n".join(str(event.facts.get("text", "")) for event in run.event_lines())


def test_a_run_whose_rank_dies_once_is_restarted_and_ends_well_with_both_logs_kept(
    tmp_path: Path, connections: Connections
) -> None:
    text = """
import os, signal, time
print("attempt", os.environ["CLUSTERCTL_ATTEMPT"], flush=True)
if os.environ["CLUSTERCTL_ATTEMPT"] == "1":
    if os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
    run = launched(tmp_path, connections, program(text, restart=Restart(max=2, backoff=0.1)))
    state = controlled(run, connections)
    assert state.phase == "finished"
    assert run.read_record().attempt == 2
    assert "restart 1 of 2 now: rank 3 on node2 (device 1) killed" in said(run)
    assert run.log("node2", 3, "out", 1).read_text() == "attempt 1\n"
    assert run.log("node1", 0, "out", 2).read_text() == "attempt 2\n"
    assert left_of(run) == 0


def test_a_port_that_was_taken_before_rank_0_had_it_is_replaced_without_any_restart(
    tmp_path: Path, connections: Connections
) -> None:
    text = """
import os, socket
port = int(os.environ["MASTER_PORT"])
print("attempt", os.environ["CLUSTERCTL_ATTEMPT"], flush=True)
if os.environ["RANK"] == "0":
    if os.environ["CLUSTERCTL_ATTEMPT"] == "1":
        taken = socket.create_server(("", port))
    try:
        socket.create_server(("", port))
    except OSError as error:
        raise RuntimeError(f"failed to listen. port: {port}, name: EADDRINUSE, message: {error}")
"""
    run = launched(tmp_path, connections, program(text))
    assert controlled(run, connections).phase == "finished"
    ports = [event.facts["port"] for event in run.event_lines() if event.kind == "started"]
    assert len(ports) == 2 and ports[0] != ports[1]
    assert "started again with another port, which is no restart: rank 0 on node1" in said(run)
    assert run.log("node1", 0, "out", 2).read_text() == "attempt 2\n"
    assert summarise(run, current_state(run, connections), time.time()).restarts == 0
    summary = summary_of(run, read_sources(run))
    assert summary.restarts == 0 and [attempt.phase for attempt in summary.attempts] == ["failed", "finished"]


@pytest.mark.parametrize("more", [{"master_port": 29417}, {}])
def test_a_port_of_the_program_or_of_the_job_is_not_replaced(
    tmp_path: Path, connections: Connections, more: dict[str, Any]
) -> None:
    port = "os.environ['MASTER_PORT']" if more else "8080"
    text = f"import os; raise RuntimeError(f'port: {{{port}}}, Address already in use')"
    run = launched(tmp_path, connections, replace(program(text), **more))
    assert controlled(run, connections).phase == "failed"
    assert run.read_record().attempt == 1


def test_a_crash_loop_ends_with_the_advice_not_to_requeue(tmp_path: Path, connections: Connections) -> None:
    text = "import os, sys; sys.exit(7 if os.environ['RANK'] == '0' else 0)"
    run = launched(tmp_path, connections, program(text, restart=Restart(max=9, backoff=0.05)))
    state = controlled(run, connections)
    assert state.phase == "failed"
    assert state.verdict.startswith("do not requeue")
    assert state.failure is not None
    assert state.failure.exit_code == 7
    assert run.read_record().attempt == 4


def test_a_stop_while_a_restart_is_awaited_ends_the_run(tmp_path: Path, connections: Connections) -> None:
    run = launched(
        tmp_path, connections, program("raise SystemExit(3)", restart=Restart(max=9, backoff=600.0))
    )
    # The first would be at once.
    run.add_event("restart", why="", wait=0.0, restarts=1, stalled=0, step=0)
    states: list[RunState] = []
    thread = threading.Thread(target=lambda: states.append(controlled(run, connections)), daemon=True)
    thread.start()
    wait_for(lambda: run.phase() == Phase.RESTARTING)
    assert current_state(run, connections).phase == Phase.RESTARTING
    assert stop_run(run, connections) == {"node1": 0, "node2": 0}
    thread.join(15)
    assert [state.phase for state in states] == ["stopped"]
    assert run.read_record().attempt == 1


def test_a_controller_after_a_dead_one_goes_on_with_its_count(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(
        tmp_path, connections, program("raise SystemExit(3)", restart=Restart(max=2, backoff=0.05))
    )
    run.add_event("restart", why="", wait=0.0, restarts=2, stalled=0, step=0)
    state = controlled(run, connections)
    assert state.verdict == "not restarted: all 2 restarts are used"


def test_fewer_nodes_serve_where_the_job_says_so(tmp_path: Path, connections: Connections) -> None:
    text = """
import os, signal, time
print(os.environ["WORLD_SIZE"], flush=True)
if os.environ["CLUSTERCTL_ATTEMPT"] == "1":
    time.sleep(600)
"""
    job = program(text, restart=Restart(max=3, backoff=0.05, min_nodes=1))
    run = launched(tmp_path, connections, job)
    control = Control(run, connections, lines=False)
    control._clear = lambda nodes: {node.name for node in nodes} - {"node1"}  # type: ignore[method-assign]
    first = next(one for one in query_nodes(run, connections).ranks if one.rank == 0)
    os.kill(first.pid, signal.SIGKILL)
    for _ in control:
        pass
    assert run.phase() == "finished"
    assert run.log("node2", 0, "out", 2).read_text() == "2\n"
    assert json.loads(run.record.read_text())["ranks"] == {"node2": [0, 1]}


def at_work(control: Control) -> threading.Thread:
    def work() -> None:
        for _ in control:
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def loses_node1_once(control: Control) -> None:
    silent = iter([{"node1"}])
    control._clear = lambda nodes: {node.name for node in nodes} - next(silent, set())  # type: ignore[method-assign]


def test_a_node_that_answers_again_stands_by_and_is_taken_in_at_the_next_restart(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.runs.controller.CHASE", 0.2)
    text = """
import os, time
print(os.environ["WORLD_SIZE"], flush=True)
time.sleep(0 if os.environ["CLUSTERCTL_ATTEMPT"] == "3" else 600)
"""
    run = launched(
        tmp_path, connections, program(text, restart=Restart(max=3, backoff=0.05, min_nodes=1), grace=1.0)
    )
    control = Control(run, connections, lines=False)
    loses_node1_once(control)
    thread = at_work(control)
    for log in (run.log("node2", 2, "out", 1), run.log("node2", 0, "out", 2)):
        wait_for(lambda log=log: log.exists() and log.read_text())  # type: ignore[misc]
        wait_for(lambda log=log: log.name == "rank-2.out" or run.read_record().spares)  # type: ignore[misc]
        living = [one for one in query_nodes(run, connections).ranks if one.state == "running"]
        os.kill(living[-1].pid, signal.SIGKILL)
    thread.join(60)
    assert run.phase() == "finished"
    assert "node1 answers again" in said(run)
    assert "without node1" in said(run)
    assert "with node1" in said(run).splitlines()
    assert run.read_record().ranks == {"node2": (0, 1), "node1": (2, 3)}
    assert run.log("node2", 0, "out", 2).read_text() == "2\n"
    assert run.log("node1", 2, "out", 3).read_text() == "4\n"


def shrunk(tmp_path: Path, connections: Connections) -> RunDir:
    """A run that ended on node2 alone after node1 was lost."""
    text = """
import os, time
print(os.environ["WORLD_SIZE"], flush=True)
time.sleep(0 if os.environ["CLUSTERCTL_ATTEMPT"] != "1" else 600)
"""
    run = launched(tmp_path, connections, program(text, restart=Restart(max=1, min_nodes=1), grace=1.0))
    control = Control(run, connections, lines=False)
    loses_node1_once(control)
    os.kill(query_nodes(run, connections).ranks[0].pid, signal.SIGKILL)
    for _ in control:
        pass
    assert run.read_record().ranks == {"node2": (0, 1)}
    return run


def test_a_resume_takes_in_a_node_that_answers_again(tmp_path: Path, connections: Connections) -> None:
    run = shrunk(tmp_path, connections)
    Control(run, connections).resume(lambda *_: None)
    assert run.read_record().ranks == {"node2": (0, 1), "node1": (2, 3)}
    assert controlled(run, connections).phase == "finished"
    assert run.log("node1", 2, "out", 3).read_text() == "4\n"


def test_a_resume_that_can_not_start_loses_no_node(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shrunk(tmp_path, connections)

    def refused(*_: object) -> None:
        raise ClusterctlError("node2 has no port")

    with monkeypatch.context() as patched:
        patched.setattr(runs, "prepare", refused)
        with pytest.raises(ClusterctlError, match="no port"):
            Control(run, connections).resume(lambda *_: None)
    assert [node.name for node in run.read_record().spares] == ["node1"]
    Control(run, connections).resume(lambda *_: None)
    assert run.read_record().ranks == {"node2": (0, 1), "node1": (2, 3)}
    assert controlled(run, connections).phase == "finished"


def test_a_stop_ends_what_still_runs_on_a_node_that_was_given_up(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("import time; time.sleep(600)", grace=0.5))
    record = run.read_record()
    gone, stays = lab(tmp_path).nodes
    abandoned = (Abandoned(gone, record.run_dirs[gone.name], 1),)
    cluster = replace(record.cluster, nodes=(stays,))
    run.write_record(replace(record, abandoned=abandoned, cluster=cluster))
    assert stop_run(run, connections) == {"node2": 0}
    assert left_of(run) == 0
    assert "node1 answers again" in said(run)


def test_where_the_job_says_so_it_is_taken_in_at_the_next_checkpoint_and_no_restart_is_spent(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.runs.controller.CHASE", 0.2)
    text = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(os.environ["WORLD_SIZE"], flush=True)
attempt, step = os.environ["CLUSTERCTL_ATTEMPT"], 0
while attempt != "3":
    time.sleep(0.2)
    if attempt == "2" and os.environ["RANK"] == "0":
        step += 1
        with open(os.environ["CLUSTERCTL_RUN_DIR"] + "/metrics.jsonl", "a") as file:
            file.write(json.dumps({"event": "checkpoint", "step": step}) + "\\n")
"""
    policy = Restart(max=1, backoff=0.05, min_nodes=1, grow="checkpoint")
    run = launched(tmp_path, connections, program(text, restart=policy, grace=5.0))
    control = Control(run, connections, lines=False)
    loses_node1_once(control)
    first = next(one for one in query_nodes(run, connections).ranks if one.rank == 0)
    os.kill(first.pid, signal.SIGKILL)
    at_work(control).join(100)
    assert run.phase() == "finished"
    assert "1 node can be used again" in said(run)
    assert run.read_record().ranks == {"node2": (0, 1), "node1": (2, 3)}
    assert sum(event.kind == "restart" for event in run.event_lines()) == 1
    assert left_of(run) == 0


def test_every_attempt_keeps_its_exit_statuses_and_its_cause(
    tmp_path: Path, connections: Connections
) -> None:
    text = "import os, sys; sys.exit('ValueError: of attempt ' + os.environ['CLUSTERCTL_ATTEMPT'])"
    job = program(text.replace("sys.exit(", "raise ValueError("), restart=Restart(max=1, backoff=0.05))
    run = launched(tmp_path, connections, job)
    state = controlled(run, connections)
    assert state.phase == "failed"
    for attempt in (1, 2):
        kept = json.loads(run.attempt_cause(attempt).read_text())
        assert kept["attempt"] == attempt
        assert f"ValueError: ValueError: of attempt {attempt}" in kept["title"]
        ranks = json.loads(run.attempt_state(attempt).read_text())["ranks"]
        assert [rank["exit_code"] for rank in ranks if rank.get("exit_code")]
    cause = read_cause(run)
    assert cause is not None
    assert run.cause.read_text() == run.attempt_cause(2).read_text()
    assert (cause.node, cause.device) in {("node1", 0), ("node1", 1), ("node2", 0), ("node2", 1)}
    last = list(run.event_lines())[-1]
    assert (last.kind, last.facts["cause"]) == ("ended", cause.title)


def test_a_killed_supervisor_leaves_no_rank_and_its_run_is_restarted(
    tmp_path: Path, connections: Connections
) -> None:
    text = "import os, time; time.sleep(600 if os.environ['CLUSTERCTL_ATTEMPT'] == '1' else 0)"
    run = launched(tmp_path, connections, program(text, restart=Restart(max=1, backoff=0.05)))
    node, record = lab(tmp_path).nodes[0], run.read_record()
    where = {"run_dir": record.run_dirs["node1"], "attempt": 1}
    os.kill(connections.of(node).call("state", where)["supervisor"]["pid"], signal.SIGKILL)
    assert controlled(run, connections).phase == "finished"
    assert "the supervisor on node1 was killed" in said(run)
    assert left_of(run) == 0


def test_what_ranks_still_wrote_after_their_supervisors_death_comes_home_too(
    tmp_path: Path, connections: Connections
) -> None:
    text = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in range(6000 if os.environ["CLUSTERCTL_ATTEMPT"] == "1" else 0):
    print(number, flush=True)
    time.sleep(0.02)
"""
    run = launched(tmp_path, connections, program(text, restart=Restart(max=1, backoff=0.05)))
    node, record = lab(tmp_path).nodes[0], run.read_record()
    where = {"run_dir": record.run_dirs["node1"], "attempt": 1}
    os.kill(connections.of(node).call("state", where)["supervisor"]["pid"], signal.SIGKILL)
    assert controlled(run, connections).phase == "finished"
    there = NodeFiles(record.run_dirs["node1"], 1)
    for rank in record.ranks["node1"]:
        assert run.log("node1", rank, "out").read_bytes() == Path(there.log(rank, "out")).read_bytes()


def test_the_ranks_of_a_killed_supervisor_end_without_any_controller(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("import time; time.sleep(600)"))
    record = run.read_record()
    for node in lab(tmp_path).nodes:
        where = {"run_dir": record.run_dirs[node.name], "attempt": 1}
        os.kill(connections.of(node).call("state", where)["supervisor"]["pid"], signal.SIGKILL)
    wait_for(lambda: left_of(run) == 0, seconds=30.0)
    assert current_state(run, connections).phase == "lost"


def test_an_end_that_nobody_saw_is_not_recorded_before_the_output_is_copied(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("print('the last line')"))
    wait_for(lambda: query_nodes(run, connections).is_final)
    # A command that only looks, after the controller was killed.
    state = current_state(run, connections)
    overview = summarise(run, state, time.time())
    assert state.phase == "finished" and not overview.is_copied
    assert "copy it with: clusterctl attach" in head(overview).plain
    assert not run.phase().is_final and not run.log("node1", 0, "out").exists()
    assert controlled(run, connections).phase == "finished"
    assert run.log("node1", 0, "out").read_text() == "the last line\n"
    assert run.read_events().events[-1].kind == "ended"
    overview = summarise(run, current_state(run, connections), time.time())
    assert overview.is_copied and "copy it" not in head(overview).plain


def test_who_looks_at_an_ended_run_or_stops_it_leaves_its_history_alone(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("raise SystemExit(3)"))
    assert controlled(run, connections).phase == "failed"
    before = {path: path.read_bytes() for path in run.root.rglob("*.json*")}
    assert stop_run(run, connections) == {"node1": 0, "node2": 0}
    current_state(run, connections)
    assert {path: path.read_bytes() for path in run.root.rglob("*.json*")} == before
    # The nodes know nothing of it any more.
    for folder in run.read_record().run_dirs.values():
        shutil.rmtree(folder)
    assert current_state(run, connections).phase == "failed"
    assert {path: path.read_bytes() for path in run.root.rglob("*.json*")} == before


def test_a_reader_is_told_when_nobody_is_in_charge_any_more(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.runs.watching.kept_watch.UNWATCHED", 0.3)
    run = launched(tmp_path, connections, program("import time; time.sleep(600)"))
    with pytest.raises(ControllerGone) as caught:
        list(KeptWatch(run))
    assert isinstance(caught.value, ClusterctlError)
    assert "--take-over" in caught.value.hint
    assert "no space" not in caught.value.message
    # Whatever is free is too little.
    monkeypatch.setattr("clusterctl.runs.watching.kept_watch.NO_ROOM", 1 << 62)
    with pytest.raises(ControllerGone) as caught:
        list(KeptWatch(run))
    assert f"no space is left for {run.root}" in caught.value.message
    assert "free some space" in caught.value.hint
    assert stop_run(run, connections, grace=0.0) == {"node1": 0, "node2": 0}


def test_a_run_that_ended_before_it_was_followed_is_told_whole_and_no_node_is_asked(
    tmp_path: Path, connections: Connections
) -> None:
    text = (
        "import os; print('x' * 3_000_000 * (os.environ['RANK'] == '0') + 'y'); print('after the long line')"
    )
    run = launched(tmp_path, connections, program(text))
    assert controlled(run, connections).phase == "finished"
    events = run.events.read_bytes()
    with Connections(ScriptedTransport({})) as nobody, following(KeptWatch(run), nobody) as watch:
        seen = [line.text for one in watch if one.chunk and one.chunk.rank == 0 for line in one.chunk.lines()]
    assert [text[-12:] for text in seen] == ["xxxxxx [...]", "he long line"]
    assert run.events.read_bytes() == events


def test_who_takes_over_shows_what_the_dead_controller_had_copied(
    tmp_path: Path, connections: Connections
) -> None:
    go = tmp_path / "go"
    text = f"""
import pathlib, time
print("first\\nsec", end="", flush=True)
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.02)
print("ond", flush=True)
print("third")
"""
    run = launched(tmp_path, connections, program(text))
    dead = iter(RunWatcher(run, connections))
    next(dead)
    ranks = (("node1", 0), ("node1", 1), ("node2", 2), ("node2", 3))
    copies = [run.log(node, rank, "out") for node, rank in ranks]
    wait_for(lambda: all(copy.exists() and copy.read_bytes() == b"first\nsec" for copy in copies))
    dead.close()  # type: ignore[attr-defined]
    go.touch()
    with following(KeptWatch(run, 1), connections) as watch:
        seen = [line.text for one in watch if one.chunk and one.chunk.rank == 0 for line in one.chunk.lines()]
    assert seen == ["first", "second", "third"]


def test_who_takes_over_shows_half_lines_of_ended_attempts_and_leaves_the_present_ones(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path / "r")
    run.write_record(record_of({"a": [0]}, run="r", attempt=2))
    for attempt in (1, 2):
        log = run.log("a", 0, "out", attempt)
        log.parent.mkdir(parents=True)
        log.write_text(f"line {attempt}\nhalf {attempt}")
    shown = [one.chunk.data for one in KeptWatch(run, 1).present() if one.chunk]
    assert sorted(shown) == [b"half 1\n", b"line 1\n", b"line 2\n"]


def test_one_controller_a_run_and_a_dead_ones_lock_is_free(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    with run.hold() as first:
        assert first
        assert run.is_watched()
        with run.hold() as second:
            assert not second
    assert not run.is_watched()
    run.lock.write_text(json.dumps({"pid": 1, "start_time": 1, "boot_id": "of another time"}))
    assert run.controller() is None
    with run.hold() as third:
        assert third


def test_the_metrics_of_a_first_node_that_is_gone_stay_and_those_of_the_next_follow(
    tmp_path: Path, connections: Connections
) -> None:
    text = """
import json, os, signal, time
attempt = int(os.environ["CLUSTERCTL_ATTEMPT"])
if os.environ["RANK"] == "0":
    with open(os.environ["CLUSTERCTL_RUN_DIR"] + "/metrics.jsonl", "a") as file:
        for step in range(10 * attempt, 10 * attempt + 3):
            file.write(json.dumps({"event": "step", "step": step}) + "\\n")
        file.write('{"half' if attempt == 1 else "")
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL) if attempt == 1 else None
time.sleep(600 if attempt == 1 else 0)
"""
    run = launched(tmp_path, connections, program(text, restart=Restart(max=1, backoff=0.05, min_nodes=1)))
    control = Control(run, connections, lines=False)
    control._clear = lambda nodes: {node.name for node in nodes} - {"node1"}  # type: ignore[method-assign]
    for _ in control:
        pass
    assert run.phase() == "finished"
    assert [metric.step for metric in run.metric_lines()] == [10, 11, 12, 20, 21, 22]


def test_a_device_in_use_by_another_run_is_refused_unless_shared(
    tmp_path: Path, connections: Connections
) -> None:
    cluster = lab(tmp_path)
    npus = replace(cluster, nodes=tuple(replace(node, kind="npu") for node in cluster.nodes))
    job = program("import time; time.sleep(600)", rank_table="never", grace=0.5)

    def start(job: jobs.Job) -> RunDir:
        return runs.launch(npus, job, connections, tmp_path / "runs", lambda phase, text: None)

    first = start(replace(job, devices=(1,)))
    with pytest.raises(ClusterctlError) as caught:
        start(job)
    assert f"node[1-2]: device 1 is in use by {first.run_id}" in str(caught.value)
    assert "--share-devices" in caught.value.hint
    beside, shared = start(replace(job, devices=(0,))), start(replace(job, share_devices=True))
    assert all(left_of(run) >= 2 for run in (first, beside, shared))
    for run in (first, beside, shared):
        assert stop_run(run, connections) == {"node1": 0, "node2": 0}


def test_a_master_port_of_another_run_is_refused(tmp_path: Path, connections: Connections) -> None:
    job = program("import time; time.sleep(600)", master_port=29511, grace=0.5)
    first = launched(tmp_path, connections, job)
    with pytest.raises(ClusterctlError, match=f"port 29511 is the master port of {first.run_id}"):
        launched(tmp_path, connections, job)
    assert stop_run(first, connections) == {"node1": 0, "node2": 0}
    again = launched(tmp_path, connections, job)
    assert stop_run(again, connections) == {"node1": 0, "node2": 0}


# -- a rank that a signal has stopped ----------------------------------------------------------------------


def test_a_stopped_rank_is_named_at_once_by_the_kernel_and_a_sleeping_one_is_not() -> None:
    sleeper, stopped = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        stopped.send_signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(stopped.pid))
        pids = {3: sleeper.pid, 4: stopped.pid}
        watched = Stopped(None)
        assert watched.find(0.0, pids) is None
        assert watched.find(9.0, pids) is None
        assert watched.find(10.5, pids) == {"rank": 4, "hang": 10.5, "stopped": True}
        assert Stopped(0.0).find(0.0, pids) is None
        quick = Stopped(2.0)
        quick.find(0.0, pids)
        stopped.send_signal(signal.SIGCONT)
        wait_for(lambda: not is_stopped(stopped.pid))
        assert quick.find(3.0, pids) is None
        # It begins anew.
        assert not quick.since
    finally:
        sleeper.kill()
        stopped.kill()
        sleeper.wait()
        stopped.wait()


# -- a controller that begins while a node is silent -------------------------------------------------------


class Halting:
    """Nodes of which one keeps everybody waiting who wants to log in."""

    def __init__(self, slow: str) -> None:
        self.slow, self.free = slow, threading.Event()
        self.local = LocalTransport()

    def connect(self, node: Node) -> Connection:
        if node.name == self.slow:
            self.free.wait(30)
            raise Unreachable(node.name, "no answer")
        return self.local.connect(node)

    def start(self, node: Node, command: str) -> Stream:
        return self.local.start(node, command)


def test_a_controller_is_in_charge_when_one_node_has_answered(tmp_path: Path) -> None:
    transport = Halting("node2")
    with Connections(transport) as connections:
        # It comes back though the other one never does.
        log_in(lab(tmp_path).nodes, connections)
        transport.free.set()


def test_a_controller_that_can_reach_nobody_says_why(tmp_path: Path) -> None:
    transport = Halting("node1")
    transport.free.set()
    with Connections(transport) as connections, pytest.raises(Unreachable, match="no answer"):
        log_in(lab(tmp_path).nodes[:1], connections)
