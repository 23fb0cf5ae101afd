"""The summary of a run out of its folder, and how it is shown at the end and by `status`."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from clusterctl.cli.views.run_end import end_block
from clusterctl.cli.views.tables import step_text
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.report.compare import measures
from clusterctl.report.curve import sparkline, thinned
from clusterctl.report.history import read_history
from clusterctl.report.page import page
from clusterctl.report.summary import RunSummary, next_commands, resume_text, summarise
from tests.clusterctl.conftest import Run
from tests.support.run_folders import BEGAN, START, STEP, end_run, restarted_run, step_line, write_lines


def text_of(summary: RunSummary, width: int = 140, *, unicode: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(end_block(summary, unicode=unicode))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_with_a_restart_is_summarised(tmp_path: Path) -> None:
    summary = summarise(restarted_run(tmp_path))
    assert (summary.steps_done, summary.steps, summary.repeated, summary.restarts) == (40, 40, 5, 1)
    assert (summary.first_loss, summary.last_loss) == (6.0, 2.1)
    assert (summary.first_eval, summary.last_eval, summary.best_eval_step) == (7.0, 2.5, 40)
    assert (summary.memory_bytes, summary.planned_bytes) == (90, 120)
    assert summary.speed.tokens_per_second == 4096 and summary.speed.step_seconds == STEP
    assert summary.speed.of_peak == 0.25
    whole = START + 25 * STEP + START + 21 * STEP
    assert summary.seconds == pytest.approx(whole)
    assert summary.goodput == pytest.approx(40 * STEP / whole), "each step counts once"
    assert summary.checkpoint and (summary.checkpoint.step, summary.checkpoint.here) == (40, "")


def test_a_tasks_accuracy_and_the_samples_per_second_are_in_the_summary(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    evals = [line for line in lines if line["event"] == "eval"]
    for line, accuracy in zip(evals, (0.25, 0.75, 0.5), strict=False):
        line["accuracy"] = accuracy
    for line in lines:
        if line["event"] == "step":
            line["samples"] = 16
    write_lines(run.metrics, lines)
    summary = summarise(run)
    right = [line["accuracy"] for line in evals]
    assert (summary.last_accuracy, summary.best_accuracy) == (right[-1], max(right))
    assert summary.speed.samples_per_second == 16 / STEP and summary.speed.tokens_per_second == 4096
    assert f"best {max(right):.2%}" in text_of(summary) and "32.00 samples/s" in text_of(summary)
    assert ["best accuracy", f"{max(right):.2%}"] in [list(row) for row in measures(summary)]
    assert summary.as_json()["speed"]["samples_per_second"] == 32.0  # type: ignore[index]


def test_samples_per_second_are_the_speed_of_a_program_that_reports_no_tokens(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step":
            line["samples_per_second"] = 601.5
    write_lines(run.metrics, lines)
    assert summarise(run).speed.samples_per_second == 16 / STEP
    for line in lines:
        line.pop("tokens_per_second", None)
    write_lines(run.metrics, lines)
    summary = summarise(run)
    assert summary.speed.samples_per_second == 601.5
    assert "601.5 samples/s, 500 ms per step" in text_of(summary)
    assert "Samples per second" in page(run) and "Tokens per second" not in page(run)
    assert ["samples/s", "601.5"] in [list(row) for row in measures(summary)]
    assert step_text(read_history(run).last, None).endswith("601.5 samples/s")


def test_attempts_have_their_steps_their_times_and_their_causes(tmp_path: Path) -> None:
    first, second = summarise(restarted_run(tmp_path)).attempts
    assert (first.number, first.from_step, first.to_step, first.phase) == (1, 0, 25, "failed")
    assert first.cause.endswith("was killed by signal 9 (SIGKILL)")
    assert first.ended == BEGAN + START + 25 * STEP
    assert (second.number, second.from_step, second.to_step) == (2, 20, 40)


def test_the_fast_reader_of_steps_reads_the_same_as_json(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    fast = read_history(run)
    # A space more, and no line has the form that is read fast.
    run.metrics.write_text(run.metrics.read_text().replace('"skipped": false', '"skipped":  false'))
    slow = read_history(run)
    assert len(fast.steps) == 45
    assert (fast.steps.step, fast.steps.start, repr(fast.steps.columns), fast.last) == (
        slow.steps.step,
        slow.steps.start,
        repr(slow.steps.columns),
        slow.last,
    )


def test_damaged_lines_of_metrics_are_left_out(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    before = summarise(run)
    run.metrics.write_bytes(
        b'{"event": "st\n\x00\x00\n[1]\n' + run.metrics.read_bytes() + b'{"event": "step", "st'
    )
    assert summarise(run) == before


def test_a_time_of_waiting_for_resume_is_not_counted(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    seconds = summarise(run).seconds
    ended = json.loads(run.events.read_text().splitlines()[-1])["time"]
    run.events.write_text(
        run.events.read_text()
        + json.dumps({"time": ended + 5000, "event": "resumed"})
        + "\n"
        + json.dumps({"time": ended + 5010, "event": "ended", "phase": "stopped"})
        + "\n"
    )
    assert summarise(run).seconds == pytest.approx(seconds + 10)


def test_the_end_of_a_run_shows_all_that_a_person_wants_to_know(tmp_path: Path) -> None:
    shown = text_of(summarise(restarted_run(tmp_path)))
    for part in (
        "40 in 31s on 4 ranks, 2 nodes, 81.9k tokens",
        "6.000 -> 2.100  █",
        "7.000 -> 2.500 (perplexity 12.18)",
        "4.1k tokens/s, 32.00 samples/s, 500 ms per step, 2.000 TFLOP/s per device (25% of its peak)",
        "at most 90 B per device (planned 120 B)",
        "65% of the time in steps that count",
        "2 attempts, 1 automatic restart; 5 steps repeated",
        "attempt 1 after step 25: rank 3 on node2 (device 1) was killed by signal 9 (SIGKILL)",
        "step 40 (3 MB), on the nodes: /nodes/node1/r/checkpoints/step-00000040",
        "clusterctl report tiny-1122-100000-abcd -o report.html",
    ):
        assert part in shown, shown
    assert text_of(summarise(restarted_run(tmp_path)), unicode=False).isascii()


def test_a_clock_that_was_set_back_gives_no_time(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    events[-1]["time"] -= 7200
    write_lines(run.events, events)
    shown = text_of(summarise(run))
    assert "40 in an unknown time (the clock was set back) on 4 ranks" in shown


def test_after_a_stop_it_says_what_resume_would_do(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    end_run(run, Phase.STOPPED)
    summary = summarise(run)
    assert resume_text(summary) == "continues after step 40; nothing is repeated"
    assert next_commands(summary)[0] == f"clusterctl resume {run.run_id}"
    kept = [line for line in run.metrics.read_text().splitlines() if '"step-00000040"' not in line]
    write_lines(run.metrics, [json.loads(line) for line in kept if "step-00000040" not in line])
    assert resume_text(summarise(run)) == "continues after step 20; 20 steps repeated"
    write_lines(run.metrics, [step_line(step, 40, BEGAN + step) for step in range(1, 8)])
    assert "starts again from step 1: no checkpoint was saved; 7 steps lost" in text_of(summarise(run))
    program = replace(summarise(run), program=True)
    assert resume_text(program).startswith("starts the command again") and "lost" not in resume_text(program)


def test_a_program_without_steps_has_a_summary_too(tmp_path: Path) -> None:
    run = restarted_run(tmp_path, job={"train": None, "command": ("true",)})
    run.metrics.unlink()
    summary = summarise(run)
    assert (summary.trains, summary.steps_done, summary.goodput) == (False, None, None)
    assert "time" in text_of(summary) and "clusterctl logs show" in text_of(summary)


def test_curves_are_thinned_without_losing_a_peak() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    thin = thinned(points, 500)
    assert len(thin) < 2_500 and (54_321.0, 99.0) in thin
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█" and sparkline([1.0]) == "" and sparkline([2.0, 2.0]) == "▁▁"


def test_attach_to_an_ended_run_shows_its_summary(tmp_path: Path, command_line: Run) -> None:
    run = restarted_run(tmp_path / "runs")
    code, out, err = command_line("attach", "last")
    assert (code, out) == (0, "") and f"finished   {run.root}" in err
    assert "goodput    65%" in err and all(line == line.rstrip() for line in err.splitlines())
    code, out, _ = command_line("attach", "last", "--json")
    assert (code, json.loads(out)["summary"]["steps_done"]) == (0, 40)
    assert "goodput" not in command_line("attach", "last", "--quiet")[2]


def test_a_hundred_thousand_steps_are_read(tmp_path: Path) -> None:
    run = RunDir(restarted_run(tmp_path).root)
    write_lines(run.metrics, [step_line(step, 100_000, BEGAN + step) for step in range(1, 100_001)])
    assert summarise(run).steps_done == 100_000
