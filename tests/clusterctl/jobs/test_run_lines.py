"""Lines of metrics and events: what is read is what was written, without wrong values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Event, Metric, read_event, read_metric
from clusterctl.runs.state import RunState, read_state, write_state


def test_a_metric_has_typed_values_and_is_written_as_it_was_read() -> None:
    line = {"event": "step", "step": 3, "steps": 9, "loss": 2.5, "lr": 0.1, "time": 7.0}
    metric = read_metric(line)
    assert metric is not None and metric.as_json() == line
    assert (metric.kind, metric.step, metric.steps, metric.loss, metric.time) == ("step", 3, 9, 2.5, 7.0)
    assert (metric.facts["lr"], metric.grad_norm) == (0.1, None)


@pytest.mark.parametrize("loss", [None, "high", True, float("inf"), 10**400])
def test_a_loss_that_is_no_finite_number_marks_the_line_as_diverged(loss: object) -> None:
    metric = read_metric({"event": "step", "step": 3, "loss": loss})
    assert metric is not None and metric.diverged and metric.loss is None
    again = read_metric(json.loads(json.dumps(metric.as_json())))
    assert again == metric


def test_an_event_is_written_as_it_was_read_and_needs_a_time_and_a_kind() -> None:
    line = {"time": 1.5, "event": "failed", "rank": 3}
    assert read_event(line) == Event(1.5, "failed", {"rank": 3})
    assert Event(1.5, "failed", {"rank": 3}).as_json() == line
    for broken in ({"event": "failed"}, {"time": 1.5}, {"time": "now", "event": "x"}, [], None):
        assert read_event(broken) is None


def test_the_last_step_of_a_recorded_state_is_read_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    step = read_metric({"event": "step", "step": 40, "loss": 2.5, "lr": 0.1})
    write_state(run, RunState(Phase.FAILED, {"a": Phase.FAILED}, step=step))
    state = read_state(run)
    assert state is not None and isinstance(state.step, Metric) and state.step == step
    assert json.loads(run.state.read_text())["step"]["lr"] == 0.1
