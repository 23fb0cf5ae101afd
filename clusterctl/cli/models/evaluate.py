"""`eval`: evaluate a checkpoint on local files, with the trainer in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options
from clusterctl.cli.models.generate import Base, Tokenizer, Where
from clusterctl.cli.models.trainer import forward
from clusterctl.wire.arguments import arguments_of
from clusterctl.wire.contract import EVALUATIONS_DIR
from clusterctl.wire.requests import ScoringOptions

if TYPE_CHECKING:
    from clusterctl.cli.models.evaluate_on import Order

TASKS = "ppl, lambada, wikitext, copa or choice"


def evaluate(
    scoring: ScoringOptions,
    where: Where = "last",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", metavar="TASK[=FILE]", help=f"A task: {TASKS}. Can be repeated."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The data of a task without =FILE.")
    ] = None,
    tokenizer: Tokenizer = None,
    base: Base = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write results. Default: with the run."),
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="SET", help="Divide the documents among these nodes.")
    ] = None,
    cluster: options.ClusterFile = None,
    *,
    as_json: options.Json = False,
) -> None:
    """Evaluate a checkpoint on local files.

    Nothing is downloaded. Results name the convention, the hashes of data and tokenizer, and standard errors. An
    interrupted evaluation continues where it stopped.
    """
    from clusterctl.cli.models import evaluate_on
    from clusterctl.errors import UsageError

    if not tasks:
        raise UsageError("--task is missing", f"name one: {TASKS}, for example --task lambada=test.jsonl")
    arguments = [*arguments_of(scoring), *([f"--base={base}"] if base else [])]
    target = output or results_of(where)
    order = evaluate_on.Order(tuple(tasks), data, tokenizer, tuple(arguments), target, scoring.device)
    if on is None:
        _evaluate_here(order, where, as_json)
    else:
        evaluate_on.evaluate(order, where, on, cluster, as_json=as_json)


def _evaluate_here(order: Order, where: str, as_json: bool) -> None:
    from clusterctl.cli.models import place

    arguments = ["--checkpoint", str(place.here(where)), "--output", str(order.output), *order.arguments]
    for task in order.tasks:
        own = None if order.data or task != "ppl" else _corpus_of(where)
        arguments += ["--task", f"{task}={own}" if own else task]
    for name, given in (("--data", order.data), ("--tokenizer", order.tokenizer)):
        arguments += [name, str(given)] if given else []
    forward("eval", "evaluate", [*arguments, *(["--json"] if as_json else [])])


def _corpus_of(where: str) -> Path | None:
    """Return the corpus of a run as this machine has it: its checkpoints record the nodes' path. None if unknown.

    Raise a UsageError if the run's data is not here.
    """
    from clusterctl.checkpoints import find
    from clusterctl.errors import UsageError
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
