"""`eval`: evaluate a checkpoint on local files, with the trainer in a separate process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterctl.cli import options, screen
from clusterctl.cli.declared import option
from clusterctl.cli.models import place
from clusterctl.cli.models.generate import Where
from clusterctl.cli.models.trainer import forward
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.files import replace_file
from clusterctl.wire.arguments import arguments_of
from clusterctl.wire.contract import EVALUATIONS_DIR
from clusterctl.wire.requests import EvaluateRequest, ScoringOptions, TaskOptions
from clusterctl.wire.results import Evaluation
from clusterctl.wire.typed_json import BadValue, decode, parse

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
    if not chosen.task:
        raise UsageError("--task is missing", f"name one: {TASKS}, for example --task lambada=test.jsonl")
    target = output or results_of(where)
    if on is not None:
        return evaluate_on(chosen, scoring, target, where, on, cluster, as_json=as_json)
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


# Keys that identify an evaluation: it replaces an older result with the same values.
IDENTITY = ("task", "convention", "checkpoint_sha256", "data_sha256", "tokenizer_sha256", "options")


def evaluate_on(
    chosen: TaskOptions,
    scoring: ScoringOptions,
    output: Path,
    where: str,
    on: str,
    inventory: Path | None,
    *,
    as_json: bool,
) -> None:
    """Evaluate on nodes, show the results and write them into a folder."""
    files: dict[str, Path | bytes] = {}
    arguments, named = ["--output", "{run_dir}/evaluations", "--json"], dict[str, Path]()
    for number, task in enumerate(chosen.task):
        name, given, file = task.partition("=")
        data = Path(file) if given else chosen.data
        if data is None:
            arguments += ["--task", name]
            continue
        stem = f"data-{number}/{data.name}"
        files |= {f"data-{number}/{part.name}": part for part in _parts(data)}
        named[stem] = data
        arguments += ["--task", f"{name}={{data}}/{stem}"]
    if scoring.tokenizer:
        if not scoring.tokenizer.is_file():
            raise UsageError(f"{scoring.tokenizer}: no such file", "name a tokenizer.json")
        files["tokenizer.json"] = scoring.tokenizer
        scoring = replace(scoring, tokenizer=Path("{data}/tokenizer.json"))
    target = place.on_nodes(where, on, inventory)
    ranks = place.ranks_of(target.cluster, scoring.device)
    answer = place.answer_of(target, "evaluate", [*arguments_of(scoring), *arguments], files, ranks)
    try:
        results = [_read(value, named, target) for value in parse(answer)]
    except (BadValue, TypeError) as problem:
        raise WorkFailed(f"the trainer's answer is wrong: {problem}") from None
    for result in results:
        _store(output, result)
    if as_json:
        screen.show_json([result.content for result in results])
    else:
        screen.write("".join(map(_text, results)))


def _parts(data: Path) -> list[Path]:
    """Return the files of a task's data: itself, or those of a corpus that is named without .bin."""
    if data.is_file():
        return [data]
    found = [part for part in sorted(data.parent.glob(f"{data.name}*")) if part.is_file()]
    if not found or not data.name:
        raise UsageError(f"{data} does not exist", "name a local file, or a corpus without .bin")
    return found


@dataclass(frozen=True)
class Result:
    """The result of one task, and its JSON as the trainer wrote it, with the names that files have here."""

    evaluation: Evaluation
    content: dict[str, object]


def _read(value: Any, named: dict[str, Path], target: place.OnNodes) -> Result:
    evaluation = decode(Evaluation, value)
    content: dict[str, object] = dict(value)
    data = next((str(data) for stem, data in named.items() if evaluation.data.endswith(f"/{stem}")), "")
    content |= {"data": data} if data else {}
    content |= {"checkpoint": str(target.local)} if target.local else {}
    return Result(replace(evaluation, data=data or evaluation.data), content)


def _store(folder: Path, result: Result) -> None:
    identity = json.dumps({name: result.content.get(name) for name in IDENTITY}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result.evaluation.task}-step-{result.evaluation.step:08d}-{key}.json"
    replace_file(file, (json.dumps(result.content, indent=1) + "\n").encode())


def _text(result: Result) -> str:
    found = result.evaluation
    lines = [f"{found.task} ({found.convention}) on {found.data}, step {found.step}:"]
    for name, figure in found.metrics.items():
        error = "" if figure.standard_error is None else f"  ± {figure.standard_error:.4g}"
        lines.append(f"  {name:20} {figure.value:.6g}{error}")
    return "".join(f"{line}\n" for line in lines)
