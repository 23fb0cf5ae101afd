"""The lines of metrics.jsonl: each event of the trainer is read as the launcher needs it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from clusterctl.wire import metrics
from clusterctl.wire.metrics import (
    KINDS,
    Ended,
    Evaluated,
    Saved,
    StepDone,
    Written,
    metric_line,
    read_metric,
)
from clusterctl.wire.results import Evaluation, Figure
from clusterctl.wire.typed_json import decode
from trainer.train.tensorboard import TAGS

STEP = StepDone(7, 9, 2.5, 1e-3, 0.5, 700, 1400.0, 0.5, skipped=False)
FIGURES = {"accuracy": Figure(0.5, None)}
EVENTS: list[tuple[Written, str]] = [
    (STEP, "step"),
    (Evaluated(7, 2.5, 1.0), "eval"),
    (Evaluation(7, "lambada", "openai", "a.jsonl", "ab", 3, FIGURES, 1.5), "evaluation"),
    (Saved(7, Path("/a/step-7"), 10, 0.5), "checkpoint"),
    (Ended(7, True, None, None, 3.0), "stopped"),
    (Ended(9, False, 2.5, None, 3.0), "end"),
]


@pytest.mark.parametrize(("event", "kind"), EVENTS, ids=[kind for _, kind in EVENTS])
def test_what_the_trainer_writes_the_launcher_reads(event: Written, kind: str) -> None:
    line = json.loads(json.dumps(metric_line(event, {"more": float("nan")})))
    found = read_metric(line)
    assert found is not None and (found.kind, found.step) == (kind, event.step)
    assert line["more"] is None and found.time is not None
    assert decode(type(event), {**line, "time": ""}) == event


def test_a_loss_that_is_not_finite_is_told() -> None:
    found = read_metric(metric_line(StepDone(1, 9, float("inf"), 1e-3, 0.5, 1, 1.0, 0.5, skipped=True), {}))
    assert found is not None and found.diverged and found.loss is None


def test_readers_ask_for_keys_that_are_declared() -> None:
    declared = {kind: {item.name for item in fields(event)} for event, kind in KINDS.items()}
    assert set(metrics.NEEDED["eval"]) <= declared["eval"]
    unknown = {(kind, key) for kind, tags in TAGS.items() for key in tags if key not in declared[kind]}
    assert unknown == {("eval", "perplexity")}
    own = {item.name for item in fields(metrics.Metric)} - {"kind", "diverged", "facts", "time"}
    assert own <= set().union(*declared.values())
