"""What Slurm says of a submitted run becomes its state, and jobs that cannot work are refused before that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from clusterctl import api
from clusterctl.backends import queue as queues
from clusterctl.backends.queue import Entry, Submission
from clusterctl.backends.slurm import programs
from clusterctl.backends.slurm.backend import BACKEND as slurm
from clusterctl.client.attempts import InJob
from clusterctl.errors import InputFaults, UsageError, WorkFailed
from clusterctl.jobs import job as jobs
from clusterctl.jobs.parts.platforms import SlurmOptions, minutes_of
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import query, stop
from clusterctl.runs.prepare import elsewhere
from clusterctl.runs.state import RunState, read_state, write_state
from clusterctl.transport.fanout import Connections
from tests.clusterctl.conftest import Run

COMMAND = "command: [hostname]\n"


@pytest.fixture
def waiting(tmp_path: Path) -> RunDir:
    """A run whose job was submitted."""
    run = RunDir(tmp_path / "runs" / "demo-1")
    job = jobs.from_command(["hostname"], None)
    imagined = slurm.imagined(SlurmOptions(nodes=2, gres="npu:8"))
    queues.write_waiting(run, job, imagined, "submitted to Slurm")
    slurm.note_submission(run, Submission(7, 0.0))
    return run


def stands(run: RunDir, state: str, reason: str = "None", start: str = "N/A") -> RunState:
    """Return the state of a run after Slurm has said, twice, how its job stands."""
    queue = {7: Entry(state, reason, "", start)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(queues, "SETTLE", 0.0)
        patched.setattr(slurm, "entries", lambda: queue)
        slurm.refresh([run])
    found = read_state(run)
    assert found is not None
    return found


def test_a_submitted_run_waits_with_the_ranks_that_it_will_have(waiting: RunDir) -> None:
    assert waiting.phase() is Phase.PENDING
    record = waiting.read_record()
    assert (record.attempt, record.world_size) == (0, 16)


def test_the_reason_and_the_expected_start_of_a_waiting_job_are_shown(waiting: RunDir) -> None:
    state = stands(waiting, "PENDING", "Resources", "2026-01-01T10:00:00")
    assert state.phase is Phase.PENDING
    assert "pending: Resources; expected to start at 2026-01-01T10:00:00" in state.verdict


@pytest.mark.parametrize(
    ("word", "phase", "text"),
    [
        ("TIMEOUT", Phase.FAILED, "time limit"),
        ("PREEMPTED", Phase.FAILED, "preempted"),
        ("NODE_FAIL", Phase.FAILED, "a node of the Slurm job failed"),
        ("OUT_OF_MEMORY", Phase.FAILED, "memory ran out"),
        ("CANCELLED", Phase.STOPPED, "cancelled"),
        ("UNKNOWN", Phase.FAILED, "before the run did"),
    ],
)
def test_the_end_of_a_job_ends_a_run_that_could_not_say_so(
    waiting: RunDir, word: str, phase: Phase, text: str
) -> None:
    write_state(waiting, RunState(Phase.RUNNING, {}))
    state = stands(waiting, word)
    assert state.phase is phase and text in state.verdict
    # Slurm soon forgets the job; what it said is kept.
    assert stands(waiting, "PENDING").phase is phase


def test_a_run_that_ended_by_itself_keeps_its_end(waiting: RunDir) -> None:
    write_state(waiting, RunState(Phase.FINISHED, {}))
    state = stands(waiting, "COMPLETED")
    assert (state.phase, state.verdict) == (Phase.FINISHED, "")


def test_a_batch_file_that_fails_says_why(waiting: RunDir) -> None:
    log = slurm.log(waiting)
    log.write_text("one\nline 14: module: command not found\x1b[0m\n\n")
    verdict = stands(waiting, "FAILED").verdict
    assert f"failed: line 14: module: command not found\\x1b[0m (see {log})" in verdict


def test_nodes_that_do_not_see_the_run_s_folder_are_named_as_the_reason(waiting: RunDir) -> None:
    assert "keep the project on a disk that all nodes share" in stands(waiting, "FAILED").verdict


def test_a_run_that_was_stopped_is_not_said_to_have_failed(waiting: RunDir) -> None:
    write_state(waiting, RunState(Phase.STOPPED, {}))
    state = stands(waiting, "FAILED")
    assert (state.phase, state.verdict) == (Phase.STOPPED, "")


def test_a_run_whose_job_has_ended_is_submitted_again(
    waiting: RunDir, command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (waiting.root / "batch.sh").write_text("#!/bin/bash\n")
    texts: list[str] = []
    monkeypatch.setattr(slurm, "entries", lambda: {7: Entry("RUNNING")})
    monkeypatch.setattr(programs, "refuse_impossible", texts.append)
    monkeypatch.setattr(slurm, "submit", lambda text: texts.append(text) or 8)
    monkeypatch.chdir(waiting.root.parent.parent)
    code, _, err = command_line("resume", waiting.run_id)
    assert code == UsageError.exit_code and "has not ended" in err and not texts
    stands(waiting, "FAILED")
    code, out, err = command_line("resume", waiting.run_id)
    assert code == 0 and out.strip() == waiting.run_id and "Slurm job 8" in err, err
    assert texts == ["#!/bin/bash\n"] * 2 and waiting.phase() is Phase.PENDING
    found = slurm.submission_of(waiting)
    assert found is not None and (found.job, found.ended) == (8, "")


def test_a_job_that_waits_again_makes_its_run_wait_again(waiting: RunDir) -> None:
    write_state(waiting, RunState(Phase.STOPPED, {}))
    assert stands(waiting, "PENDING", "BeginTime").phase is Phase.PENDING


def test_a_job_on_its_way_back_into_the_queue_has_not_ended(
    waiting: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([{7: Entry("FAILED")}, {7: Entry("PENDING", "BeginTime")}])
    monkeypatch.setattr(queues, "SETTLE", 0.0)
    monkeypatch.setattr(slurm, "entries", lambda: next(answers))
    slurm.refresh([waiting])
    assert waiting.phase() is Phase.PENDING


def test_a_run_that_runs_is_not_touched(waiting: RunDir) -> None:
    write_state(waiting, RunState(Phase.RUNNING, {}))
    before = waiting.state.read_bytes()
    assert stands(waiting, "RUNNING").phase is Phase.RUNNING
    assert waiting.state.read_bytes() == before


def test_without_slurm_s_programs_the_recorded_state_is_shown(
    waiting: RunDir, command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str, **more: object) -> str:
        raise UsageError(f"there is no `{words[0]}` here")

    monkeypatch.setattr(programs, "run", refused)
    monkeypatch.chdir(waiting.root.parent.parent)
    code, out, err = command_line("runs")
    assert code == 0 and "pending" in out and "Slurm could not be queried: there is no `squeue` here" in err
    code, out, _ = command_line("status", waiting.run_id)
    assert code == 0 and "pending  submitted to Slurm" in out


def test_the_queue_is_read_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "7|PENDING|Resources||2026-01-01T10:00:00\n8|RUNNING|None|node[1-2]|N/A\n9_1|PENDING|x||\nodd\n"
    monkeypatch.setattr(programs, "run", lambda *words, **more: text)
    assert slurm.entries()[7] == Entry("PENDING", "Resources", "", "2026-01-01T10:00:00")
    assert slurm.entries()[8].nodes == "node[1-2]"
    assert set(slurm.entries()) == {7, 8}


@pytest.mark.parametrize(
    ("time", "minutes"), [("90", 90), ("1:30", 1.5), ("2:00:00", 120), ("1-12", 2160), ("1-0:30", 1470)]
)
def test_times_of_slurm(time: str, minutes: float) -> None:
    assert minutes_of(time) == minutes


def test_contradictions_of_a_job_are_refused_together(tmp_path: Path, command_line: Run) -> None:
    Path("job.yaml").write_text(f"{COMMAND}nodes: node1\ngrace: 300\nslurm: {{time: 3, signal: 120}}\n")
    code, _, err = command_line("submit", "slurm", "job.yaml", "--print")
    assert code == 2
    for text in ("the 300 s of `grace`", "leaves no time of '3'", "Slurm chooses the nodes", "job.yaml:"):
        assert text in err
    assert not Path("runs").exists()


def test_values_that_are_no_time_and_no_count_are_refused_together(command_line: Run) -> None:
    Path("job.yaml").write_text(f"{COMMAND}slurm: {{nodes: 0, time: later, signal: 120}}\n")
    code, _, err = command_line("submit", "slurm", "job.yaml", "--print")
    assert code == 2 and "slurm.nodes: 0 is too small" in err and "'later' is not a time" in err


def test_printing_submits_nothing_and_leaves_no_run(command_line: Run) -> None:
    Path("job.yaml").write_text(f"{COMMAND}slurm: {{nodes: 4, gres: 'npu:8'}}\n")
    code, out, _ = command_line("submit", "slurm", "job.yaml", "--print")
    assert code == 0 and "#SBATCH --nodes=4" in out and "submit start" in out
    assert command_line("runs", "--json")[1].strip() == "[]"


def test_a_job_that_slurm_does_not_take_leaves_no_run(
    command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(text: str) -> int:
        raise WorkFailed("sbatch: QOSMaxSubmitJobPerUserLimit")

    monkeypatch.setattr(programs, "refuse_impossible", lambda text: "")
    monkeypatch.setattr(slurm, "submit", refused)
    Path("job.yaml").write_text(COMMAND)
    assert command_line("submit", "slurm", "job.yaml")[0] == 4
    assert command_line("runs", "--json")[1].strip() == "[]"


def test_a_command_of_notify_is_checked_where_the_job_starts(
    command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(text: str) -> int:
        raise WorkFailed("sbatch was called")

    monkeypatch.setattr(programs, "refuse_impossible", lambda text: "")
    monkeypatch.setattr(slurm, "submit", refused)
    Path("job.yaml").write_text(f"{COMMAND}notify: ./on-the-batch-node.sh\n")
    assert "sbatch was called" in command_line("submit", "slurm", "job.yaml")[2]
    Path("cluster.yaml").write_text("nodes: {node1: {host: 10.0.0.1, devices: 1}}\n")
    code, _, err = command_line("launch", "job.yaml")
    assert code == 2 and "notify: ./on-the-batch-node.sh: no such file" in err


def test_devices_that_the_job_does_not_ask_for_are_refused(
    command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "refuse_impossible", lambda text: pytest.fail("Slurm was asked"))
    Path("job.yaml").write_text(f"{COMMAND}devices: '[0,8)'\nslurm: {{gres: 'npu:4'}}\n")
    code, _, err = command_line("submit", "slurm", "job.yaml")
    assert code == 2 and "devices" in err


def test_a_part_with_faults_names_them(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{COMMAND}slurm: {{time: 1h}}\n")
    with pytest.raises(InputFaults, match=r"yaml:2 slurm\.time: '1h' is not a time"):
        jobs.load(file)


def test_a_machine_without_a_cluster_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text(
        "#!/bin/sh\necho 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UsageError, match="no Slurm cluster answers here") as refused:
        programs.refuse_impossible("")
    assert "login node" in refused.value.hint


def test_a_continued_job_of_slurm_reports_a_missing_command_of_notify_and_starts(
    waiting: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = waiting.read_record()
    waiting.write_record(replace(record, job=replace(record.job, notify="./nosuch.sh")))
    started = []
    monkeypatch.setattr(stop, "stop_nodes", lambda *_, **__: None)
    monkeypatch.setattr(query, "query_nodes", lambda *_: RunState(Phase.FAILED, {}))
    monkeypatch.setattr(elsewhere, "resume_on", lambda *_: started.append("started"))
    told: list[str] = []
    waiting.write_record(replace(waiting.read_record(), attempt=1))
    InJob(waiting, record.cluster, False, told.append).start(cast(Connections, None), lambda *_: None)
    problem = "notify: ./nosuch.sh: no such file"
    assert started == ["started"] and problem in told[0]
    assert any(problem in str(event.facts.get("text")) for event in waiting.event_lines())


def test_a_python_program_sees_and_ends_a_run_that_waits_for_its_nodes(
    waiting: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[int] = []
    monkeypatch.setattr(type(slurm), "queue", lambda self: {7: Entry("PENDING", "Priority")}, raising=False)
    monkeypatch.setattr(type(slurm), "cancel", lambda self, job: cancelled.append(job))
    run = api.find_run("demo", waiting.root.parent)
    assert run.state().phase is Phase.PENDING
    run.stop()
    assert cancelled == [7] and run.phase == "stopped"
    with pytest.raises(UsageError, match="has no nodes yet"), api.Run(_waiting_again(waiting)).connected():
        pass


def _waiting_again(run: RunDir) -> RunDir:
    queues.write_pending(run, "waits")
    return run
