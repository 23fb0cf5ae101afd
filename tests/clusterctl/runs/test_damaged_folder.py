"""Damaged, old and newer files in the folder of a run: what can still be done with it."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clusterctl.cli.runs.runs import _row
from clusterctl.cli.views.run_status import head, line, whole
from clusterctl.errors import UsageError
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT, to_json
from clusterctl.jobs.run_folder import RunDir, all_runs
from clusterctl.jobs.run_lines import read_metric
from clusterctl.runs import prune
from clusterctl.runs import start as starts
from clusterctl.runs.finish import bring_checkpoint, superseded_steps
from clusterctl.runs.overview import Overview, summarise
from clusterctl.runs.query import current_state
from clusterctl.runs.state import read_state
from clusterctl.runs.stop import stop_run
from clusterctl.transport.fanout import Connections
from tests.clusterctl.runs.test_controller import controlled
from tests.clusterctl.runs.test_run import connections as connections
from tests.clusterctl.runs.test_run import launched, left_of, program
from tests.support.records import record_of
from tests.support.scripted import ScriptedTransport


def make(folder: Path, name: str, **more: Any) -> RunDir:
    run = RunDir(folder / name)
    run.write_record(record_of({"a": [0, 1], "b": [2]}, run=name, created=100.0, **more))
    run.write_json(run.state, {"phase": "finished", "nodes": {"a": "finished", "b": "finished"}})
    return run


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"run": "r"}', '{"ranks": 3}', "\0" * 40, "[" * 99_999]
)
def test_one_damaged_record_among_many_is_marked_and_the_others_are_listed(tmp_path: Path, text: str) -> None:
    runs = [make(tmp_path, f"r-{number}") for number in range(3)]
    runs[1].record.write_text(text)
    rows = {row.run: row.phase for row in map(_row, all_runs(tmp_path))}
    assert rows == {"r-0": "finished", "r-1": "damaged", "r-2": "finished"}
    with pytest.raises(UsageError, match=r"run\.json: unreadable"):
        runs[1].read_record()


def test_bad_lines_of_the_history_are_skipped_and_counted(tmp_path: Path) -> None:
    run = make(tmp_path, "r")
    run.add_event("started", ranks=3)
    with run.events.open("ab") as file:
        file.write(
            b'{"time": 1, "ev\n' + b"\0" * 30 + b"\n[1, 2]\n\xff\xfe\n" + b'{"time": "x", "event": "a"}\n'
        )
        file.write(b"x" * (3 << 20) + b"\n")
    run.add_event("ended", phase="finished")
    with run.events.open("ab") as file:
        file.write(b'{"half')
    history = run.read_events()
    assert [event.kind for event in history.events] == ["started", "ended"]
    assert history.damaged == 6


@pytest.mark.parametrize("text", ["", "{", '{"phase": "odd"}', '{"phase": ["x"]}', "[]"])
def test_a_run_is_stopped_though_its_state_is_damaged(
    tmp_path: Path, connections: Connections, text: str
) -> None:
    run = launched(tmp_path, connections, program("import time; time.sleep(600)", grace=0.5))
    run.state.write_text(text)
    run.events.write_bytes(b"\xff\n")
    assert run.phase() is Phase.UNKNOWN
    assert current_state(run, connections).phase is Phase.RUNNING
    run.state.write_text(text)
    assert stop_run(run, connections) == {"node1": 0, "node2": 0}
    assert left_of(run) == 0


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("state.json", "", "unreadable"),
        ("state.json", '{"phase": "finis', "unreadable"),
        ("state.json", '{"format": 99, "phase": "finished"}', "a newer version of clusterctl wrote it"),
        ("plan.json", "{", "unreadable"),
        ("plan.json", "[]", "not a JSON object"),
        ("stop.json", "", "unreadable"),
        ("cause.json", '{"title": 3}', "unreadable"),
        ("attempts/1/state.json", "{", "unreadable"),
        (
            "metrics.jsonl",
            '{"event": "step", "step": 1}\n{"ev\n',
            "1 line of metrics.jsonl could not be read",
        ),
        ("events.jsonl", '{"time": 1, "ev\n', "1 line of events.jsonl could not be read"),
    ],
)
def test_the_status_of_a_run_names_its_damaged_files(
    tmp_path: Path, connections: Connections, name: str, text: str, reason: str
) -> None:
    run = launched(tmp_path, connections, program("print('done')"))
    assert controlled(run, connections).phase == "finished"
    (run.root / name).write_text(text)
    overview = summarise(run, current_state(run, connections), time.time())
    assert len(overview.damaged) == 1 and reason in overview.damaged[0]
    assert name.rpartition("/")[2] in overview.damaged[0]
    shown = text_of(overview)
    assert reason in shown and "without a controller" not in shown
    # An attach writes the state again.
    assert controlled(run, connections).phase == "finished"
    assert name != "state.json" or not summarise(run, current_state(run, connections), time.time()).damaged


def test_each_damaged_file_has_a_line_of_its_own(tmp_path: Path, connections: Connections) -> None:
    run = launched(tmp_path, connections, program("print('done')"))
    assert controlled(run, connections).phase == "finished"
    for name in ("plan.json", "stop.json"):
        (run.root / name).write_text("")
    shown = text_of(summarise(run, current_state(run, connections), time.time())).splitlines()
    assert len([line for line in shown if "unreadable" in line]) == 2


def text_of(overview: Overview) -> str:
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(whole(overview))
    return console.export_text()


def test_a_run_of_a_newer_version_is_stopped_and_not_restarted(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("import time; time.sleep(600)", grace=0.5))
    value = json.loads(run.record.read_text())
    value["job"]["grace"] = {"of": "another kind"}
    newer = {**value, "format": FORMAT + 1, "new_key": [1]}
    newer["cluster"]["nodes"][0]["new_key"] = True
    run.record.write_text(json.dumps(newer))
    assert run.read_record().is_newer
    overview = summarise(run, current_state(run, connections), time.time())
    assert "a newer version of clusterctl started this run" in head(overview).plain
    assert overview.as_json()["is_newer"] is True
    # What `status --watch` writes without a terminal, and `runs` below its table.
    assert line(overview).endswith("started by a newer version of clusterctl")
    assert _row(run).cause == "a newer version of clusterctl started it"
    assert stop_run(run, connections) == {"node1": 0, "node2": 0}
    assert left_of(run) == 0
    with pytest.raises(UsageError, match="a newer version of clusterctl started this run"):
        starts.resume(run, connections, lambda *_: None)


def test_a_record_of_version_0_1_is_read(tmp_path: Path) -> None:
    run = make(tmp_path, "r")
    old = to_json(record_of({"a": [0]}, run="r"))
    for key in ("format", "size", "metrics_base", "spares", "abandoned"):
        del old[key]
    del old["cluster"]["groups"]
    run.record.write_text(json.dumps(old))
    record = run.read_record()
    assert (record.format, record.full_size, record.spares, record.is_newer) == (1, 1, (), False)
    run.state.write_text(json.dumps({"phase": "failed", "nodes": {"a": "failed"}, "ranks": [{"rank": 0}]}))
    state = read_state(run)
    assert state is not None and state.phase is Phase.FAILED and state.ranks[0].rank == 0


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    run = make(tmp_path, "r")
    record = record_of({"a": [0]}, job={"code": Path("/code"), "devices": (1, 2), "env": {"A": "1"}})
    record = replace(record, metrics_base=7, spares=record.cluster.nodes)
    run.write_record(record)
    assert run.read_record() == record


def test_a_thousand_runs_are_listed_and_surveyed_in_a_second(tmp_path: Path) -> None:
    metrics = b"".join(b'{"event": "step", "step": %d, "loss": 2.5}\n' % step for step in range(500))
    first = make(tmp_path, "r-0")
    record, state = first.record.read_bytes(), first.state.read_bytes()
    for number in range(1000):
        run = RunDir(tmp_path / f"r-{number}")
        run.make()
        run.record.write_bytes(record)
        run.state.write_bytes(state)
        run.metrics.write_bytes(metrics)
    began = time.process_time()
    rows = [_row(run) for run in all_runs(tmp_path)]
    listed = time.process_time() - began
    assert len(rows) == 1000 and {row.loss for row in rows} == {"2.5000"}
    script = ScriptedTransport({("*", "alive"): {"alive": [False] * 1000}})
    began = time.process_time()
    with Connections(script) as scripted:
        done = prune.prune(all_runs(tmp_path), lambda cluster: scripted, dry_run=True)
    surveyed = time.process_time() - began
    asked = [len(params["attempts"]) for _, _, params in script.asked if "attempts" in params]
    assert asked == [1000, 1000], "each node is asked once"
    assert all(not result.kept for result in done)
    # Under 0.5 s each on an idle machine; this one may be busy.
    assert listed < 2.0 and surveyed < 3.0


def superseded_by(lines: list[dict[str, object]]) -> set[int]:
    return superseded_steps(metric for line in lines if (metric := read_metric(line)))


def test_a_checkpoint_that_a_resumed_attempt_passed_over_is_not_brought_here(tmp_path: Path) -> None:
    lines = [
        {"event": "start", "step": 0},
        *({"event": "checkpoint", "step": step} for step in (100, 200, 300)),
    ]
    assert superseded_by(lines) == set()
    lines.append({"event": "start", "step": 200})
    assert superseded_by(lines) == {300}
    run = make(tmp_path, "r")
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = [
        {"name": f"step-00000{step}", "kind": "d", "size": 0, "mtime": 0.0} for step in (100, 200, 300)
    ]
    script = ScriptedTransport(
        {("*", "list"): {"missing": False, "entries": entries}, ("*", "tree"): UsageError("enough")}
    )
    with Connections(script) as scripted, pytest.raises(UsageError, match="enough"):
        bring_checkpoint(run, scripted)
    assert script.asked[-1][2]["path"] == "/nodes/a/r/checkpoints/step-00000200"
    assert superseded_by([*lines, {"event": "checkpoint", "step": 300}]) == set()
