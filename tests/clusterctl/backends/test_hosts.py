"""Grid Engine, PBS and LSF: their batch files and words; whole runs with stand-ins of the programs of PBS and LSF."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.backends import backend as backends
from clusterctl.backends.hosts import HostsQueue
from clusterctl.backends.queue import Entry
from clusterctl.errors import InputFaults
from clusterctl.jobs import job as jobs
from clusterctl.jobs.run_folder import RunDir
from tests.clusterctl.conftest import Run

STAND_IN = Path(__file__).resolve().parents[2] / "support" / "batch_stand_in.py"
PROGRAMS = ("qsub", "qstat", "qdel", "bsub", "bjobs", "bkill")
BOTH = pytest.mark.parametrize("name", ["pbs", "lsf"])


def queue(name: str) -> HostsQueue:
    found = backends.named(name)
    assert isinstance(found, HostsQueue)
    return found


def written(folder: Path, text: str) -> jobs.Job:
    (folder / "job.yaml").write_text(f"command: [hostname]\n{text}\n")
    return jobs.load(folder / "job.yaml")


@pytest.fixture
def batch_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put the stand-ins on the path, in a project of its own."""
    for name in PROGRAMS:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
        program.chmod(0o755)
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("STAND_IN", str(tmp_path / "jobs"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "job.yaml").write_text(text)

    return write


def status(command_line: Run, run: str) -> dict[str, Any]:
    code, out, err = command_line("status", run, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def wait(command_line: Run, run: str, phase: str) -> None:
    deadline = time.monotonic() + 100
    while (found := status(command_line, run))["phase"] != phase:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


PART = (
    "{nodes: 4, queue: big, project: lab, devices: 8, kind: npu, time: 90, resources: RES, extra: ['-p 5']%s}"
)
HEADERS = {
    "sge": (
        ", pe: mpi, slots: 8",
        ["-pe mpi 32", "-l h_rt=5400", "-q big", "-P lab", "-l RES", "-notify", "-r y"],
    ),
    "pbs": (
        "",
        ["-l select=4:RES:mpiprocs=1", "-l place=scatter", "-l walltime=01:30:00", "-q big", "-P lab"],
    ),
    "lsf": ("", ["-n 4", '-R "span[ptile=1]"', "-W 90", "-q big", "-P lab", "-R RES", "-r"]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_job_becomes_the_lines_of_its_batch_file(tmp_path: Path, name: str) -> None:
    more, expected = HEADERS[name]
    job = written(tmp_path, f"{name}: {PART % more}")
    text = queue(name).batch_file(RunDir(tmp_path / "demo-1"), job, ["x", "a b"])
    mark = {"sge": "#$", "pbs": "#PBS", "lsf": "#BSUB"}[name]
    lines = text.splitlines()
    assert {f"{mark} {line}" for line in (*expected, "-p 5")} <= set(lines), text
    assert "export CLUSTERCTL_DEVICE_KIND=npu CLUSTERCTL_DEVICES=8" in lines
    assert lines[-1] == "exec x 'a b'"
    cluster = queue(name).imagined(queue(name).options(job))
    assert [(node.kind, len(node.devices)) for node in cluster.nodes] == [("npu", 8)] * 4
    # 120 seconds before the end of 90 minutes.
    assert queue(name).saves_after(queue(name).options(job)) == 5280


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("sge: {nodes: 2}", "2 nodes need a parallel environment"),
        ("sge: {extra: ['-N x']}", "the run needs its own -N"),
        ("pbs: {extra: ['-q x']}", "is a key of this part"),
        ("lsf: {extra: ['x']}", "is not an option of bsub"),
        ("lsf: {kind: tpu}", "'tpu'"),
    ],
)
def test_parts_that_cannot_work_are_refused(tmp_path: Path, part: str, says: str) -> None:
    with pytest.raises(InputFaults, match=says):
        written(tmp_path, part)


def test_the_hosts_of_a_job_come_from_its_variables(tmp_path: Path) -> None:
    (tmp_path / "pe").write_text("n1.lab 8 all.q@n1.lab UNDEFINED\nn2.lab 8 all.q@n2.lab UNDEFINED\n")
    (tmp_path / "nodes").write_text("n1.lab\nn1.lab\nn2.lab\n")
    told = {"CLUSTERCTL_DEVICES": "2", "CLUSTERCTL_DEVICE_KIND": "cuda"}
    for name, own in {
        "sge": {"JOB_ID": "7", "PE_HOSTFILE": str(tmp_path / "pe")},
        "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")},
        "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1.lab 8 n2.lab 8"},
    }.items():
        backend = backends.around(own)
        assert backend is queue(name)
        nodes = backend.allocated({**own, **told}, "cpu").nodes
        assert [(node.name, node.host, node.allocation) for node in nodes] == [
            ("n1", "n1.lab", f"{name}:7"),
            ("n2", "n2.lab", f"{name}:7"),
        ]
        assert {(node.kind, node.devices) for node in nodes} == {("cuda", (0, 1))}


@BOTH
def test_a_submitted_job_runs_and_is_followed(
    batch_system: Callable[[str], None], command_line: Run, name: str
) -> None:
    batch_system(f"command: [sh, -c, 'echo rank $RANK of $WORLD_SIZE']\n{name}: {{devices: 2}}\n")
    code, out, err = command_line("submit", name, "job.yaml")
    assert code == 0, err
    run = out.strip()
    wait(command_line, run, "finished")
    code, out, err = command_line("logs", "show", run, "--rank", "0-1")
    assert "rank 0 of 2" in out and "rank 1 of 2" in out, out + err
    code, _, err = command_line("resume", run)
    assert "has not ended" in err or code == 0, err


@BOTH
def test_a_running_job_is_stopped_by_its_controller(
    batch_system: Callable[[str], None], command_line: Run, name: str
) -> None:
    batch_system(f"command: [sleep, '300']\ngrace: 2\n{name}: {{}}\n")
    run = command_line("submit", name, "job.yaml")[1].strip()
    wait(command_line, run, "running")
    nodes = status(command_line, run)["overview"]["nodes"]
    assert [node["ranks"] for node in nodes] == [{"running": 1}]
    code, _, err = command_line("stop", run)
    assert code == 0 and "has ended it" in err, err
    assert status(command_line, run)["phase"] == "stopped"


@BOTH
def test_a_waiting_job_says_why_and_is_cancelled(
    batch_system: Callable[[str], None], command_line: Run, name: str
) -> None:
    batch_system(f"command: [hostname]\n{name}: {{queue: full}}\n")
    assert "only when it is submitted" in command_line("submit", name, "job.yaml", "--test")[1]
    run = command_line("submit", name, "job.yaml")[1].strip()
    _, out, _ = command_line("status", run)
    assert {
        "pbs": "PBS job 1 is queued: Not Running: Insufficient",
        "lsf": "LSF job 1 is pend: Not enough GPUs",
    }[name] in out
    code, _, err = command_line("stop", run)
    assert code == 0 and "was cancelled before it started" in err, err
    assert status(command_line, run)["phase"] == "stopped"


@BOTH
def test_a_batch_file_that_fails_says_why(
    batch_system: Callable[[str], None], command_line: Run, name: str
) -> None:
    batch_system(f"command: [hostname]\n{name}: {{setup: [no-such-module load cann]}}\n")
    run = command_line("submit", name, "job.yaml")[1].strip()
    wait(command_line, run, "failed")
    _, out, _ = command_line("runs")
    assert "no-such-module" in out


@pytest.mark.parametrize(
    ("name", "ended", "state"),
    [
        ("pbs", {"job_state": "F", "Exit_status": 271}, "KILLED"),
        ("pbs", {"job_state": "F", "Exit_status": 1}, "FAILED"),
        ("pbs", {"job_state": "F", "Exit_status": 0}, "DONE"),
        ("lsf", "7|EXIT|TERM_RUNLIMIT: job killed after reaching LSF run time limit|-|-", "LIMIT"),
        ("lsf", "7|EXIT|TERM_MEMLIMIT: job killed after reaching LSF memory usage limit|-|-", "MEMORY"),
        ("lsf", "7|DONE|-|-|-", "DONE"),
        (
            "sge",
            "failed       37  : qmaster enforced h_rt, h_cpu, or h_vmem limit\nexit_status  137\n",
            "LIMIT",
        ),
        ("sge", "failed       100 : assumedly after job\nexit_status  137\n", "KILLED"),
        ("sge", "failed       0    \nexit_status  3                   \n", "FAILED"),
    ],
)
def test_the_end_of_a_job_is_read_in_the_words_of_its_batch_system(
    monkeypatch: pytest.MonkeyPatch, name: str, ended: Any, state: str
) -> None:
    text = json.dumps({"Jobs": {"7.server": ended}}) if isinstance(ended, dict) else ended
    monkeypatch.setattr(queue(name), "ask", lambda *words, **_: text)
    assert queue(name).ended(7).state == state


def test_jobs_of_grid_engine_are_read_from_its_xml(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs_xml = "".join(
        f"<job_list state='x'><JB_job_number>{number}</JB_job_number><state>{state}</state></job_list>"
        for number, state in ((7, "qw"), (8, "r"), (9, "Eqw"))
    )
    reason = (
        "error reason          1:          11/29/2026 can't chdir to /nowhere: No such file or directory\n"
    )
    answers = {"-xml": f"<job_info><queue_info>{jobs_xml}</queue_info></job_info>", "-j": reason}
    monkeypatch.setattr(queue("sge"), "ask", lambda *words, **_: answers[words[1]])
    found = queue("sge").entries()
    assert (found[7], found[8]) == (Entry("qw"), Entry("r"))
    assert "can't chdir to /nowhere" in found[9].reason and "qmod -cj 9" in found[9].reason
