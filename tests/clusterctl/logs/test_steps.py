"""The steps of programs that know nothing of clusterctl, found in what they write."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs import job as jobs
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Metric
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
    parser = parser or StepParser(clock=lambda: 100.0)
    return [
        {key: value for key, value in metric.as_json().items() if key != "time"}
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


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step 4/2000 | loss 3.25", [{"event": "step", "step": 4, "steps": 2000, "loss": 3.25}]),
        (
            "[rank 0] Iter: 4, train loss = 3.25 lr: 1e-4",
            [{"event": "step", "step": 4, "loss": 3.25, "lr": 1e-4}],
        ),
        ("12:00 INFO step=4 train_loss=3.25", [{"event": "step", "step": 4, "loss": 3.25}]),
        ("step 4 | val loss 3.5", [{"event": "eval", "step": 4, "loss": 3.5}]),
        (
            "step 4 loss 3.25 val_loss 3.5",
            [{"event": "eval", "step": 4, "loss": 3.5}, {"event": "step", "step": 4, "loss": 3.25}],
        ),
        ("epoch 1 step 4/200 loss 3.25", []),
        ("step 4 of the setup: lossless copy 3", []),
        ("timestep 4 loss 3.25", []),
        ("step 4 begins", []),
        ("step 1.5 loss 2", []),
    ],
)
def test_plain_lines_with_a_step_and_a_loss(line: str, found: list[dict[str, Any]]) -> None:
    for wanted in found:
        if wanted["event"] == "step":
            wanted["format"] = "steps and losses"
    assert steps_of(line + "\n") == found


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
    assert (second["step"], second["loss"]) == (20, 3.75)
    # The rate that the bar shows.
    assert second["step_seconds"] == pytest.approx(1 / 9)
    assert (evaluation["event"], evaluation["step"], evaluation["loss"]) == ("eval", 20, 3.5)


def hugging_faces_pieces(steps: int, every: int, shown: int) -> list[tuple[Stream, bytes]]:
    """Return what its Trainer writes, in order: losses, and a bar that is erased and drawn again for each of them.

    The bar is drawn for one of `shown` steps. Each second loss is followed by an evaluation with a bar of its own.
    """
    pieces = ["\r  0%|          | 0/60 [00:00<?, ?it/s]"]
    for step in range(1, steps + 1):
        bar = f"\r {100 * step // steps:2}%|#####     | {step}/{steps} [00:01<00:41,  1.44s/it]"
        blank = f"\r{' ' * 46}\r"
        if step % shown == 0:
            pieces.append(bar)
        if step % every == 0:
            loss = (
                f"{{'loss': '{step / 8}', 'grad_norm': '0.8', 'learning_rate': '5e-05', 'epoch': '0.01'}}\n"
            )
            pieces += [blank, loss, "\n", bar]
        if step % (2 * every) == 0:
            below = "\n\r 40%|####      | 2/5 [00:00<00:00,  7.29it/s]\x1b[A"
            loss = f"{{'eval_loss': '{step / 8}', 'eval_runtime': '1.625', 'epoch': '0.01'}}\n"
            pieces += [below, f"{blank}\n{blank}\x1b[A", loss, bar, below, f"\n\r{' ' * 46}\x1b[A"]
    return [(Stream.OUT if piece[0] == "{" else Stream.ERR, piece.encode()) for piece in [*pieces, "\n"]]


@pytest.mark.parametrize("shown", [1, 4, 1000])
@pytest.mark.parametrize("every", [1, 5])
def test_each_loss_of_hugging_faces_trainer_has_its_step_however_the_streams_arrive(
    tmp_path: Path, every: int, shown: int
) -> None:
    pieces = hugging_faces_pieces(60, every, shown)
    numbers = range(every, 61, every)
    wanted = {("step", number, number / 8) for number in numbers}
    wanted |= {("eval", number, number / 8) for number in numbers[1::2]}
    for seed in range(10):
        draw = random.Random(seed)
        _, steps = followed(tmp_path / str(seed))
        rest, found = list(pieces), []
        while rest:
            count = draw.choice((1, 1, 2, 5, 30, 1000))
            for stream in (Stream.OUT, Stream.ERR):
                data = b"".join(piece for kind, piece in rest[:count] if kind is stream)
                found += steps.feed(Source("n1", 0, stream), data, 0.0)
            del rest[:count]
        found += steps.end("n1")
        lines = [(line.kind, line.step, line.loss) for line in found if line.kind != "start"]
        assert len(lines) == len(wanted) and set(lines) == wanted, seed
        assert {line.steps for line in found if line.kind == "step"} == {60}


def test_hugging_faces_losses_without_a_progress_bar_are_counted(tmp_path: Path) -> None:
    _, steps = followed(tmp_path)
    source = Source("n1", 0, Stream.OUT)
    line = b"{'loss': '4.5', 'epoch': '0.17'}\n"
    found = [metric.step for _ in range(3) for metric in steps.feed(source, line) if metric.kind == "step"]
    assert found == [1, 2] and [metric.step for metric in steps.end("n1")] == [3]


def test_mindformers_and_nanogpts_lines() -> None:
    step, second = steps_of(MINDFORMERS + MINDFORMERS.replace("Epoch:[  1/", "Epoch:[  2/"))
    assert (second["step"], second["steps"]) == (1010, 2000), "steps begin again in each epoch"
    assert (step["step"], step["steps"], step["loss"], step["grad_norm"], step["step_seconds"]) == (
        10,
        2000,
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
    assert (first["step"], first["diverged"], "loss" in first, second["step"]) == (1, True, False, 2)


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
    assert [metric.kind for metric in steps.feed(last, MEGATRON[half:].encode())] == [
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
    assert [line.kind for line in lines] == ["step", "eval"] and again.finished


def json_lines(first: int, last: int) -> bytes:
    return b"".join(b'{"step": %d, "loss": 2.0}\n' % step for step in range(first, last + 1))


def seconds_of(metrics: Iterable[Metric]) -> list[float | None]:
    return [metric.step_seconds for metric in metrics if metric.kind == "step"]


def test_lines_that_were_written_at_once_give_no_speed_among_themselves() -> None:
    clock = iter((1000.0, 1010.0, 1010.004, 1010.1, 1012.0, 1012.05)).__next__
    parser = StepParser(clock=clock)
    assert seconds_of(parser.feed(json_lines(1, 20))) == [None] * 20
    # A buffer of 20 lines every 10 s, the first of them in two pieces of which only the last one's end has an age.
    assert seconds_of(parser.feed(json_lines(21, 30), None)) == [None] * 10
    assert seconds_of(parser.feed(json_lines(31, 40), 0.004)) == pytest.approx([0.5] * 10)
    # Too soon to measure: what was measured last still holds.
    assert seconds_of(parser.feed(json_lines(41, 41))) == pytest.approx([0.5])
    assert seconds_of(parser.feed(json_lines(42, 45))) == pytest.approx([0.4] * 4)
    # The same without a step since.
    assert seconds_of(parser.feed(json_lines(45, 45))) == []


def test_a_step_is_timed_by_when_its_line_was_written_not_by_when_it_arrived() -> None:
    parser = StepParser(clock=iter((100.0, 160.0)).__next__)
    list(parser.feed(json_lines(1, 1), 0.0))
    # The link was cut meanwhile.
    (metric,) = parser.feed(json_lines(2, 2), 58.0)
    assert metric.step_seconds == pytest.approx(2.0) and metric.time == pytest.approx(102.0)


def test_the_times_in_a_programs_lines_give_its_speed_however_they_arrive() -> None:
    line = "[2026-11-22 23:59:{:02},{:03}] [INFO] [Rank 0] step={}, skipped=0, lr=[0.001], mom=[0.9]\n"
    text = "".join(line.format(50 + step // 4, step % 4 * 250, step) for step in range(1, 9))
    first, *others = seconds_of(StepParser(clock=lambda: 5.0).feed(text.encode()))
    assert first is None and others == pytest.approx([0.25] * 7)
    # Whole seconds are too coarse for steps of one second; what cannot be a time is none.
    coarse = "".join(f"2026-11-22 10:00:{step:02} step {step}\n2026-99-22 10:00:00 x\n" for step in range(50))
    pattern = pattern_format(r"step (?P<step>\d+)")
    found = seconds_of(StepParser((pattern,), clock=lambda: 5.0).feed(coarse.encode()))
    assert found[:20] == [None] * 20 and found[20:] == pytest.approx([1.0] * 30)


def test_a_buffered_program_has_the_speed_of_its_steps_at_the_end_of_the_run(tmp_path: Path) -> None:
    run, steps = followed(tmp_path)
    rank = Source("n1", 0, Stream.OUT)
    steps.feed(rank, json_lines(1, 100), 30.0)
    assert summarise(run).speed.step_seconds is None
    steps.feed(rank, json_lines(101, 200), 20.0)
    steps.feed(rank, json_lines(201, 300), 10.0)
    assert summarise(run).speed.step_seconds == pytest.approx(0.1, rel=0.05)


def test_a_program_that_reports_every_tenth_step_has_the_goodput_of_all(tmp_path: Path) -> None:
    run, steps = followed(tmp_path)
    lines = "".join(f"iter {step}: loss 3.0, time 100ms\n" for step in (10, 20, 30))
    steps.feed(Source("n1", 0, Stream.OUT), lines.encode())
    assert summarise(run, now=1.0 + 21.0).goodput == pytest.approx(2.1 / 21)


def test_metrics_that_the_program_writes_itself_come_first(tmp_path: Path) -> None:
    run, steps = followed(tmp_path)
    steps.feed(Source("n1", 0, Stream.OUT), NANOGPT.encode())
    write_lines(run.metrics, [{"event": "step", "step": 99, "loss": 1.0, "time": 5.0}])
    assert (run.last_step() or Metric()).step == 99
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
