"""The steps of programs that know nothing of clusterctl, found in what they write."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs import job as jobs
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.steps import StepParser, pattern_format
from clusterctl.report.summary import summarise
from clusterctl.runs.watching.log_steps import LogSteps
from clusterctl.runs.watching.stall import LATER, Silence
from clusterctl.runs.watching.updates import Source, Stream
from tests.clusterctl.conftest import Run
from tests.support.records import record_of
from tests.support.run_folders import write_lines

MEGATRON = (
    " [2026-11-22 10:00:00] iteration       20/     100 | consumed samples:          160 | elapsed time per iteration"
    " (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 45.1 | learning rate: 1.500000E-04 | global batch size:     8 |"
    " lm loss: 6.250000E+00 | loss scale: 1.0 | grad norm: 3.212 | number of skipped iterations:   0 |\n"
    " validation loss at iteration 20 | lm loss value: 6.100000E+00 | lm loss PPL: 4.458E+02 | \n"
)
DEEPSPEED = (
    "[2026-11-22 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[0.9]\n"
    "[2026-11-22 10:00:01,000] [INFO] [timer.py:260:stop] epoch=0/micro_step=10/global_step=10,"
    " RunningAvgSamplesPerSec=60.1, CurrSamplesPerSec=64.5, MemAllocated=1.0GB, MaxMemAllocated=2.0GB\n"
    "steps: 20 loss: 5.1250 iter time (s): 0.125 samples/sec: 64.000\n"
)
HF = (
    "\r  0%|          | 0/60 [00:00<?, ?it/s]\r 17%|##        | 10/60 [00:01<00:05,  9.0it/s]\n"
    "{'loss': 4.5, 'grad_norm': 2.25, 'learning_rate': 5e-05, 'epoch': 0.17}\n"
    "\r 33%|###       | 20/60 [00:02<00:04,  9.0it/s]\n"
    "{'loss': '3.75', 'grad_norm': '2', 'learning_rate': '4e-05', 'epoch': '0.33'}\n"
    "{'eval_loss': 3.5, 'eval_runtime': 1.0, 'epoch': 0.33}\n"
)
MINDFORMERS = (
    "2026-11-22 10:00:00,000 - mindformers[mindformers/core/callback/callback.py:316] - INFO - { Epoch:[  1/  2],"
    " step:[   10/ 1000], loss: 5.123, per_step_time: 250ms, lr: 1e-05, overflow cond: False, loss_scale: 65536.0,"
    " global_norm: [1.5], train_throughput_per_npu: 120.5T\n"
)
NANOGPT = (
    "step 0: train loss 10.9, val loss 10.8\n"
    "iter 0: loss 10.9, time 100.00ms, mfu -100.00%\n"
    "iter 10: loss 9.5, time 80.00ms, mfu 12.0%\n"
)


def steps_of(text: str, parser: StepParser | None = None) -> list[dict[str, Any]]:
    parser = parser or StepParser(clock=iter(itertools.count(100.0, 2.0)).__next__)
    return [
        {key: value for key, value in metric.items() if key != "time"}
        for metric in parser.feed(text.encode())
    ]


def test_megatrons_lines() -> None:
    step, evaluation = steps_of(MEGATRON)
    assert step == {
        "event": "step",
        "step": 20,
        "steps": 100,
        "loss": 6.25,
        "lr": 1.5e-4,
        "grad_norm": 3.212,
        "step_seconds": 0.5,
        "samples_per_second": 16.0,
        "format": "Megatron-LM",
    }
    assert evaluation == {"event": "eval", "step": 20, "loss": 6.1}


def test_deepspeeds_lines_of_both_engines() -> None:
    first, second = steps_of(DEEPSPEED)
    assert (first["step"], first["lr"]) == (10, 0.001) and "loss" not in first
    assert (second["step"], second["loss"], second["step_seconds"], second["samples_per_second"]) == (
        20,
        5.125,
        0.125,
        64.0,
    )


def test_hugging_faces_lines_get_their_step_from_the_progress_bar() -> None:
    first, second, evaluation = steps_of(HF)
    assert (first["step"], first["steps"], first["loss"], first["grad_norm"], first["lr"]) == (
        10,
        60,
        4.5,
        2.25,
        5e-5,
    )
    assert (second["step"], second["loss"], second["step_seconds"]) == (20, 3.75, 0.2)
    assert (evaluation["event"], evaluation["step"], evaluation["loss"]) == ("eval", 20, 3.5)


def test_mindformers_and_nanogpts_lines() -> None:
    (step,) = steps_of(MINDFORMERS)
    assert (step["step"], step["steps"], step["loss"], step["grad_norm"], step["step_seconds"]) == (
        10,
        1000,
        5.123,
        1.5,
        0.25,
    )
    evaluation, first, second = steps_of(NANOGPT)
    assert (evaluation["event"], evaluation["step"], evaluation["loss"]) == ("eval", 0, 10.8)
    assert (first["step"], second["step"], second["loss"], second["step_seconds"]) == (0, 10, 9.5, 0.08)


def test_lines_of_json_and_a_pattern_of_the_user() -> None:
    assert steps_of('{"step": 3, "loss": 2.5, "other": "x"}\n')[0]["loss"] == 2.5
    parser = StepParser((pattern_format(r"Schritt (?P<step>\d+) von (?P<steps>\d+): Verlust (?P<loss>\S+)"),))
    (step,) = steps_of("Schritt 7 von 9: Verlust 1.25\n", parser)
    assert (step["step"], step["steps"], step["loss"], step["format"]) == (7, 9, 1.25, "pattern")


def test_a_loss_that_is_not_finite_is_kept_as_such_and_a_step_is_never_reported_twice() -> None:
    first, second = steps_of(
        "iter 1: loss nan, time 10ms\niter 1: loss 3, time 10ms\niter 2: loss 3, time 10ms\n"
    )
    assert (first["step"], first["loss"], second["step"]) == (1, None, 2)


@pytest.mark.parametrize(
    "text",
    [
        "Downloading: 10%|#  | 10/100 [00:01]\n",
        "loss: high\n",
        "step one\n",
        "{'loss': \n",
        '{"step": "x"}\n',
        "\n",
        "x" * 9000,
    ],
)
def test_other_output_is_not_taken_for_a_step(text: str) -> None:
    assert steps_of(text) == []


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "not a regular expression"),
        (r"(?P<loss>\d+)", "no group (?P<step>"),
        (r"(?P<step>.)(?P<lsos>.)", "'lsos'"),
    ],
)
def test_a_wrong_pattern_is_a_fault_of_the_job_with_its_line(
    tmp_path: Path, pattern: str, problem: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"command: [python, train.py]\nprogress: '{pattern}'\n")
    with pytest.raises(Exception) as caught:
        jobs.load(path)
    assert problem in str(caught.value) and "job.yaml:2" in str(caught.value)
    path.write_text("command: [python, train.py]\nprogress: off\n")
    assert jobs.load(path).progress == "off"


def followed(tmp_path: Path, **job: Any) -> tuple[RunDir, LogSteps]:
    record = record_of({"n1": [0], "n2": [1]}, job={"command": ("x",), **job}, created=1.0)
    run = RunDir(tmp_path / record.run)
    run.write_record(record)
    return run, LogSteps(run, record)


def test_the_rank_that_reports_steps_is_followed_and_its_steps_are_recorded(tmp_path: Path) -> None:
    run, steps = followed(tmp_path)
    last = Source("n2", 1, Stream.OUT)
    half = len(MEGATRON) // 3
    assert steps.feed(Source("n1", 0, Stream.OUT), b"loading\n") == []
    assert steps.feed(last, MEGATRON[:half].encode()) == []
    assert [metric["event"] for metric in steps.feed(last, MEGATRON[half:].encode())] == [
        "start",
        "step",
        "eval",
    ]
    assert steps.feed(Source("n1", 0, Stream.OUT), MEGATRON.replace("20/", "30/").encode()) == []
    summary = summarise(run)
    assert (summary.steps_done, summary.steps, summary.last_loss, summary.last_eval) == (20, 100, 6.25, 6.1)
    assert run.last_step() and not steps.finished
    # A controller that takes over continues.
    again = LogSteps(run, run.read_record())
    lines = again.feed(last, MEGATRON.replace(" 20/", "100/").encode())
    assert [line["event"] for line in lines] == ["step", "eval"] and again.finished


def test_a_program_that_reports_every_tenth_step_has_the_goodput_of_all(tmp_path: Path) -> None:
    run, steps = followed(tmp_path)
    lines = "".join(f"iter {step}: loss 3.0, time 100ms\n" for step in (10, 20, 30))
    steps.feed(Source("n1", 0, Stream.OUT), lines.encode())
    assert summarise(run, now=1.0 + 21.0).goodput == pytest.approx(2.1 / 21)


def test_metrics_that_the_program_writes_itself_come_first(tmp_path: Path) -> None:
    run, steps = followed(tmp_path)
    steps.feed(Source("n1", 0, Stream.OUT), NANOGPT.encode())
    write_lines(run.metrics, [{"event": "step", "step": 99, "loss": 1.0, "time": 5.0}])
    assert (run.last_step() or {})["step"] == 99
    _, off = followed(tmp_path, progress="off")
    assert not off.wanted


def test_a_program_that_only_chatters_between_its_steps_counts_as_hung() -> None:
    now = [0.0]
    silence = Silence(record_of({"n1": [0]}, job={"command": ("x",), "hang_after": 60.0}), lambda: now[0])
    silence.stepped("n1", 0, finished=False)
    now[0] = 61.0 + LATER
    silence.broken_by("n1", 0)
    assert silence.hang(()) is not None
    silence.stepped("n1", 0, finished=True)
    now[0] += 61.0 + LATER
    silence.broken_by("n1", 0)
    assert silence.hang(()) is None, "after its last step it may save for a long time"


def test_tensorboards_files_are_written_from_the_steps_of_a_program(
    tmp_path: Path, command_line: Run
) -> None:
    run, steps = followed(tmp_path / "runs")
    steps.feed(Source("n1", 0, Stream.OUT), NANOGPT.encode())
    code, _, _ = command_line("tensorboard", "last")
    assert code == 0 and list((run.root / "tensorboard").glob("events.out.tfevents.*"))
    assert json.loads(command_line("report", "last", "--json")[1])["steps_done"] == 10
