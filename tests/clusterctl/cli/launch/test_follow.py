"""What a terminal that follows a run shows of what the run reached before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.cli import screen
from clusterctl.cli.launch.follow import Follower
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import in_charge
from clusterctl.runs.overview import read_progress
from clusterctl.runs.start import _processors
from clusterctl.runs.watching.kept_watch import KeptWatch
from clusterctl.transport.answers import Hello
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from tests.support.run_folders import restarted_run


def ended_run(folder: Path) -> RunDir:
    run = restarted_run(folder)
    run.metrics.unlink()
    return run


def metrics(first: int, count: int) -> str:
    """Return the lines of a training that starts before step `first`."""
    start = {"event": "start", "step": first - 1, "parameters": 1000, "time": 1.0}
    steps = [
        {"event": "step", "step": step, "steps": 9, "loss": 2.0, "step_seconds": 0.1, "time": 1.0}
        for step in range(first, first + count)
    ]
    return "".join(json.dumps(line) + "\n" for line in (start, *steps))


def test_a_resume_shows_no_step_of_the_earlier_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_run(tmp_path)
    run.metrics.write_text(metrics(1, 3))
    known = run.written_metrics()
    with run.metrics.open("a") as file:
        file.write(metrics(4, 1))
    lines: list[str] = []
    monkeypatch.setattr(screen, "log", lambda text, style="": lines.append(text))
    with (
        Connections(LocalTransport(home=tmp_path)) as connections,
        in_charge.following(KeptWatch(run, known=known), connections) as watch,
        Follower(run) as follower,
    ):
        for update in watch:
            follower.show(update)
    assert [line.split()[1:4] for line in lines if "parameters" in line] == [["1k", "parameters,", "from"]]
    assert "from step 3" in lines[0] and not any("step 1/9" in line or "step 3/9" in line for line in lines)


def test_who_attaches_sees_the_last_start_and_the_last_step_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_run(tmp_path)
    run.metrics.write_text(metrics(1, 3) + metrics(4, 2))
    lines: list[str] = []
    monkeypatch.setattr(screen, "log", lambda text, style="": lines.append(text))
    with Follower(run, progress=read_progress(run.metric_lines())):
        shown = list(lines)
    assert len(shown) == 2 and "from step 3" in shown[0] and "step 5/9" in shown[1]


def test_nodes_that_are_one_machine_share_its_processors() -> None:
    hellos = {
        "a": Hello(boot_id="one", cpus=8, machine_cpus=8),
        "b": Hello(boot_id="one", cpus=8, machine_cpus=8),
        "narrow": Hello(boot_id="one", cpus=1, machine_cpus=8),
        "alone": Hello(boot_id="two", cpus=4, machine_cpus=16),
        "unknown": Hello(cpus=2, machine_cpus=2),
    }
    assert _processors(hellos) == {"a": 2, "b": 2, "narrow": 1, "alone": 4, "unknown": 2}
