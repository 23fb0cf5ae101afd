"""What is drawn from values: figures in words, the loss curve, remote text made harmless."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.console import RenderableType as Renderable

from clusterctl import text as clusterctl_text
from clusterctl.checkpoints.checkpoint import Health
from clusterctl.cli.views import checkpoints, layout, tables
from clusterctl.jobs.run_lines import Metric, read_metric
from clusterctl.logs.store import LogLine
from clusterctl.runs.overview import TrainProgress, read_progress
from clusterctl.text import escape_controls, escape_in_json
from clusterctl.wire.train_summary import CorpusUse, Rehearsal, TrainCheck
from clusterctl.wire.typed_json import BadValue, decode, encode
from trainer.plan.summary import check


def drawn(*what: Renderable, width: int = 80) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(*what, sep="\n")
    return captured.get()


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (clusterctl_text.count(1_071_872), "1.07M"),
        (clusterctl_text.count(512), "512"),
        (clusterctl_text.count(506.189), "506.2"),
        (clusterctl_text.size(347_000), "347 kB"),
        (clusterctl_text.size(2.5e9), "2.5 GB"),
        (clusterctl_text.size(12), "12 B"),
        (clusterctl_text.duration(59.4), "59s"),
        (clusterctl_text.duration(185), "3m05s"),
        (clusterctl_text.duration(7800), "2h10m"),
        (clusterctl_text.duration(259_200 - 60), "71h59m"),
        (clusterctl_text.duration(13_791_060), "159d14h"),
        (clusterctl_text.duration(math.inf), "?"),
        (clusterctl_text.plural(1, "node"), "1 node"),
        (clusterctl_text.plural(2, "node"), "2 nodes"),
        (clusterctl_text.device_text([4, 5, 6]), "[4,7)"),
        (clusterctl_text.device_text([5, 1]), "5,1"),
        (clusterctl_text.device_text([]), "none"),
    ],
)
def test_figures_are_said_as_people_say_them(said: str, wanted: str) -> None:
    assert said == wanted


def test_the_loss_curve_falls_from_left_to_right_within_its_width() -> None:
    points = [(float(step), 7.0 * math.exp(-step / 40) + 2.0) for step in range(1, 201)]
    text = drawn(tables.loss_curve(points, [(0.0, 9.0), (200.0, 2.1)], width=70, height=10), width=80)
    lines = text.splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) <= 70
    assert lines[0].split("|")[0].strip() == "9.000"
    assert lines[0].split("|")[1].startswith("o")
    assert lines[9].rstrip().endswith("o")
    heights = [
        min(row for row, line in enumerate(lines[:10]) if len(line) > 9 + at and line[9 + at] not in " ")
        for at in (2, 20, 50)
    ]
    assert heights == sorted(heights)
    assert lines[-1].strip().startswith("step 0")


def test_a_curve_of_nothing_of_one_point_and_of_a_flat_line_is_drawn_too() -> None:
    assert "no steps yet" in drawn(tables.loss_curve([]))
    for points in ([(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]):
        assert len(drawn(tables.loss_curve(points)).splitlines()) == 14


def test_remote_text_reaches_the_terminal_without_its_controls() -> None:
    hostile = LogLine("n", 1, "out", "\x1b]0;owned\x07\x1b[2J [/red] \u202etxt")
    text = drawn(tables.log_line(hostile))
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "[/red]" in text
    table = drawn(tables.table(["A"], [["\x1b[31mx[/bold]"]]))
    assert "\x1b[31m" not in table and "[/bold]" in table


def metric_of(line: dict[str, object]) -> Metric:
    metric = read_metric(line)
    assert metric is not None
    return metric


def test_a_progress_line_tells_step_loss_speed_and_what_is_left() -> None:
    progress = TrainProgress()
    for step in range(1, 11):
        metric = {
            "event": "step",
            "step": step,
            "steps": 100,
            "loss": 3.5,
            "grad_norm": 1.0,
            "step_seconds": 0.5,
        }
        progress.feed(metric_of({**metric, "tokens_per_second": 12_345.0}))
    assert progress.last is not None and progress.left == pytest.approx(45.0)
    said = tables.step_text(progress.last, progress.left)
    assert said == "step 10/100  loss 3.5000  grad 1.00  12.3k tokens/s  45s left"


def test_metrics_of_any_program_are_shown_as_far_as_they_make_sense() -> None:
    lines = [
        5,
        None,
        "x",
        {"event": "step"},
        {"event": "step", "step": "ten"},
        {"event": ["step"]},
        {"event": "eval"},
    ]
    odd = Metric(facts={"event": ["step"]})
    assert [read_metric(line) for line in lines] == [None, None, None, None, None, odd, None]
    bare = metric_of({"event": "step", "step": 3, "steps": "?", "loss": None, "tokens_per_second": True})
    assert tables.step_text(bare, None) == "step 3  loss not finite"
    assert tables.step_text(metric_of({"step": 3}), None) == "step 3"
    start = metric_of({"event": "start", "native": [1, {}]})
    assert tables.start_text(start) == "begins\nkernels    None for None"
    later = metric_of({"event": "step", "step": 4, "steps": 9, "loss": 1.5, "step_seconds": 2.0})
    read = read_progress([bare, later])
    assert (read.losses, read.left) == ([(4, 1.5)], 10.0)


def test_steps_that_a_resume_repeats_are_drawn_once() -> None:
    metrics = [{"event": "step", "step": n, "steps": 5, "loss": float(n)} for n in (1, 2, 3, 4, 3, 4, 5)]
    assert [step for step, _ in read_progress(map(metric_of, metrics)).losses] == [1, 2, 3, 4, 5]


def test_the_start_of_a_training_says_which_backend_serves_which_op() -> None:
    ops = [{"op": "a", "backend": "cpu"}, {"op": "b", "backend": "reference"}, {"op": "c", "backend": "cpu"}]
    start = {"parameters": 1e6, "engine": "torch", "zero": 0, "precision": "bf16", "step": 4, "native": ops}
    assert tables.start_text(metric_of(start)).splitlines() == [
        "1M parameters, torch engine, zero 0, bf16, from step 4",
        "kernels    cpu for a, c; plain torch for b",
    ]
    many = [*({"op": f"op{n}", "backend": "cpu"} for n in range(14)), {"op": "b", "backend": "reference"}]
    assert tables.start_text(metric_of({"native": many})).endswith(
        "\nkernels    cpu for 14 ops; plain torch for b"
    )
    passed = "passed over a checkpoint: /c/step-00000008/part-00000.safetensors: damaged"
    noted = tables.start_text(metric_of({"step": 4, "notes": [passed, "note: another"]}))
    assert noted == f"from step 4\ncheckpoint {passed}"


def test_json_holds_nothing_that_a_terminal_obeys_and_reads_back_the_same() -> None:
    value = {"a\u200b": ["\u202e\x85\x7f\udcff", "é😀 日本\n\x1b"], "\ufeff": None}
    text = escape_in_json(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(text) == value and "é😀 日本" in text
    assert all(escape_controls(line) == line for line in text.split("\n"))


def test_below_a_list_of_runs_stands_why_the_newest_failed() -> None:
    rows = [
        tables.ListedRun(f"r{number}", "failed", "", cause=f"cause {number}\x1b" if number % 2 else "")
        for number in range(20)
    ]
    said = tables.causes_text(rows).plain.splitlines()
    assert said == ["", *[f"r{number}: cause {number}\\x1b" for number in (1, 3, 5, 7, 9)]]


TRAIN = {
    "model": "gpt-tiny",
    "data": {"prefix": "/data/wiki"},
    "steps": 8,
    "micro_batch": 1,
    "optimizer": {"lr": 1e-3},
}


def test_a_plan_tells_the_share_and_the_epochs_of_each_of_several_corpora() -> None:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs import job, plan

    cluster = Cluster("lab", (Node("node1", "10.0.0.1", "10.0.0.1", devices=(0,), kind="cpu"),))
    made = plan.make_plan(cluster, job.Job(name="mix", command=("true",), source="job.yaml"))
    corpus = CorpusUse("/data/wi\x1bki", 300, 104_000, 0.75, 1.25)
    answer = check({"train": TRAIN, "world_size": 1})
    summary = decode(TrainCheck, answer).summary
    assert summary is not None and encode(summary) == json.loads(json.dumps(answer["summary"]))
    alone, two = (replace(summary, corpora=(corpus,) * number) for number in (1, 2))
    assert "corpus" not in drawn(tables.plan_facts(made, alone))
    line = "corpus      75.0% wi\\x1bki: 1.2 epochs of 104k tokens"
    assert drawn(tables.plan_facts(made, two)).count(line) == 2


def test_a_plan_tells_what_offload_takes_of_a_disk() -> None:
    answer = check({"train": TRAIN, "world_size": 1})
    summary = decode(TrainCheck, answer).summary
    assert summary is not None and "nvme_path" not in drawn(*layout.training(summary))
    moved = replace(summary, offload_disk_bytes=21_000_000_000)
    line = "offload takes up to 21 GB of each node's disk (nvme_path)"
    assert line in drawn(*layout.training(moved))


def test_an_answer_of_the_trainer_without_a_figure_is_refused_with_its_key() -> None:
    answer = check({"train": TRAIN, "world_size": 1})
    del answer["summary"]["checkpoints"]["kept"]
    with pytest.raises(BadValue, match=r"summary\.checkpoints\.kept is missing"):
        decode(TrainCheck, answer)


def test_a_list_of_runs_in_80_columns_cuts_no_id_in_two() -> None:
    name = "a-name-of-thirty-letters-or-so-1121-174202-a439"
    long = tables.ListedRun(name, "failed", "2026-11-21 17:42:03", ranks=2, nodes=1)
    assert all(len(line) <= 80 for line in drawn(tables.runs_table([long])).splitlines())
    assert name in drawn(tables.runs_table([long])) and "LOSS" not in drawn(tables.runs_table([long]))
    trained = drawn(tables.runs_table([long, replace(long, run="b", step=7, loss="3.21")]))
    assert name in trained
    short = drawn(tables.runs_table([replace(long, run="gpt-1121-174202-a439", step=7, loss="3.2100")]))
    assert "LOSS" in short and "3.2100" in short and "11-21 17:42:03" in short


def test_a_rehearsal_is_compared_with_the_plan() -> None:
    done = Rehearsal(
        peak_bytes=2_000_000_000,
        operations=12,
        exchanges={"all_reduce": 3, "broadcast": 1},
        exchanged_bytes=0,
        parameters=1000,
        planned_parameters=1000,
        planned_bytes=1_900_000_000,
        layers=2,
        stage=0,
        rank=0,
        ranks=8,
        engine="torch",
        seconds=1.5,
    )
    assert list(layout._rehearsed(done)) == [
        ("rehearsal", "one rank of 8, 2 layers, built and run for one step here in 1.5 s"),
        ("", "1k parameters (as planned)"),
        ("", "12 operations, 3 all_reduce, 1 broadcast"),
        ("", "peak memory 2 GB; planned 1.9 GB"),
    ]


def test_a_narrow_list_of_checkpoints_keeps_the_machines() -> None:
    entry = SimpleNamespace(
        bytes=11_300_000, loss=6.1033, eval_loss=6.3603, tokens=41_000, time=0.0, state="all"
    )
    one = SimpleNamespace(
        facts=entry,
        name="step-00000040",
        health=Health.COMPLETE,
        missing=0,
        in_use=False,
        copies=2,
        nodes=("node1", "node2", "here"),
        holdings=(),
    )
    found: Any = SimpleNamespace(checkpoints=[one], latest="step-00000040")
    text = drawn(checkpoints.list_table(found))
    assert "node[1-2], here" in text and "complete, latest" in text and "TOKENS" not in text


def test_the_end_of_a_demo_shows_how_to_reach_the_program_only_if_it_is_not_on_the_path() -> None:
    plain = tables.demo_end(Path("/d"), Path("runs/r"), Path("c"), "", keep=False, seconds=1.0).plain
    assert "try next:\n  cd d\n  clusterctl generate last" in plain
    activated = tables.demo_end(
        Path("/d"), Path("r"), Path("c"), ". /v/bin/activate", keep=False, seconds=1.0
    )
    assert "  cd d\n  . /v/bin/activate\n  clusterctl generate" in activated.plain
