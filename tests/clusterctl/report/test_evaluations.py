"""Results of evaluations appear in the summary of a run and in its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clusterctl.report.evaluations import figures_text, read_evaluations
from clusterctl.report.page import page
from clusterctl.report.summary import summarise
from tests.clusterctl.report.test_summary import text_of
from tests.support.run_folders import restarted_run

RESULT: dict[str, Any] = {
    "task": "lambada",
    "convention": "lm-eval",
    "step": 40,
    "data": "lambada.jsonl",
    "data_sha256": "0" * 64,
    "documents": 5153,
    "metrics": {
        "accuracy": {"value": 0.45, "standard_error": 0.0069},
        "perplexity": {"value": 16.25, "standard_error": None},
    },
    "time": "2026-01-01T00:00:00Z",
}


def test_results_are_shown_with_step_and_convention(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    folder = run.root / "evaluations"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(RESULT))
    (folder / "b.json").write_text(json.dumps({**RESULT, "step": 20, "task": "copa"}))
    (folder / "damaged.json").write_text('{"task": 3')
    (folder / "other.json").write_text('{"task": 3}')
    found = read_evaluations(run)
    first, second = found.results
    assert [text.partition(":")[0] for text in found.damaged] == [
        "evaluations/damaged.json",
        "evaluations/other.json",
    ]
    assert (first.task, first.step, second.task) == ("copa", 20, "lambada")
    assert figures_text(second) == "accuracy 0.45 ± 0.0069, perplexity 16.25"
    text = text_of(summarise(run))
    assert "lambada" in text and "accuracy 0.45 ± 0.0069" in text and "step 40, lm-eval" in text
    assert "evaluations/damaged.json: " in text and "evaluations/other.json: " in text
    assert "16.25" in page(run)


def test_results_of_the_training_itself_are_shown_once_a_step(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    line = {key: value for key, value in RESULT.items() if key != "time"} | {"event": "evaluation"}
    worse = {**line, "metrics": {"accuracy": {"value": 0.25, "standard_error": None}}}
    lines = [{**worse, "time": 1.0}, {**line, "time": 2.0}, {"event": "evaluation", "time": 3.0}]
    with run.metrics.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    summary = summarise(run)
    assert [str(found.metrics["accuracy"]) for found in summary.evaluations] == ["0.45 ± 0.0069"]
    assert summary.damaged_evaluations == ()


def test_a_run_without_evaluations_has_none(tmp_path: Path) -> None:
    assert summarise(restarted_run(tmp_path)).evaluations == ()
