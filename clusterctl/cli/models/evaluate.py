"""`eval`: evaluate a checkpoint on local files, with the trainer in a separate process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterctl.cli import options
from clusterctl.cli.declared import option
from clusterctl.cli.models.generate import Where
from clusterctl.cli.models.trainer import forward
from clusterctl.errors import UsageError
from clusterctl.wire.arguments import arguments_of
from clusterctl.wire.contract import EVALUATIONS_DIR
from clusterctl.wire.requests import EvaluateRequest, ScoringOptions, TaskOptions

TASKS = "ppl, lambada, wikitext, copa or choice"


def evaluate(
    chosen: TaskOptions,
    scoring: ScoringOptions,
    where: Where = "last",
    output: Path | None = option(
        "Where to write results. Default: with the run.", "--output", "-o", metavar="DIR"
    ),
    on: str | None = option("Divide the documents among these nodes.", metavar="SET"),
    cluster: options.ClusterFile = None,
    *,
    as_json: options.Json = False,
) -> None:
    """Evaluate a checkpoint on local files.

    Nothing is downloaded. Results name the convention, the hashes of data and tokenizer, and standard errors. An
    interrupted evaluation continues where it stopped.
    """
    from clusterctl.cli.models import evaluate_on

    if not chosen.task:
        raise UsageError("--task is missing", f"name one: {TASKS}, for example --task lambada=test.jsonl")
    target = output or results_of(where)
    if on is not None:
        return evaluate_on.evaluate(chosen, scoring, target, where, on, cluster, as_json=as_json)
    from clusterctl.cli.models import place

    folder, tasks = place.here(where), chosen.task
    own = _corpus_of(where) if "ppl" in tasks and not chosen.data else None
    named = tuple(f"{task}={own}" if own and task == "ppl" else task for task in tasks)
    request = EvaluateRequest(
        checkpoint=folder, tasks=replace(chosen, task=named), model=scoring, output=target, json=as_json
    )
    forward("eval", "evaluate", arguments_of(request))
    return None


def _corpus_of(where: str) -> Path | None:
    """Return the corpus of a run as this machine has it: its checkpoints record the nodes' path. None if unknown.

    Raise a UsageError if the run's data is not here.
    """
    from clusterctl.checkpoints import find
    from clusterctl.jobs.job_check import corpus_here

    if find.is_folder(where):
        return None
    run = options.run_with_results(where, trains=True)
    corpus = corpus_here(run.read_record().job)
    if corpus is None or corpus.with_name(f"{corpus.name}.idx").is_file():
        return corpus
    raise UsageError(
        f"{corpus}: the corpus of {run.run_id} is not on this machine",
        "--data FILE names another place; --on NODE evaluates on a node that has it",
    )


def results_of(where: str) -> Path:
    """Return the folder for results: in the folder of a run, or ./evaluations for a checkpoint's folder."""
    return (
        Path(EVALUATIONS_DIR)
        if Path(where).is_dir()
        else options.run_with_results(where, trains=True).root / EVALUATIONS_DIR
    )
