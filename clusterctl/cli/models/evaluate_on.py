"""`eval --on`: the documents divided among nodes, and the results stored here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from clusterctl.cli import screen
from clusterctl.cli.models import place
from clusterctl.errors import UsageError
from clusterctl.files import replace_file
from clusterctl.json_types import JsonObject

# What a figure depends on: the same evaluation replaces its older result.
IDENTITY = ("task", "convention", "checkpoint_sha256", "data_sha256", "tokenizer_sha256", "options")


@dataclass(frozen=True)
class Order:
    """What to evaluate, and where the results go."""

    tasks: tuple[str, ...]
    """TASK or TASK=FILE."""
    data: Path | None
    tokenizer: Path | None
    arguments: tuple[str, ...]
    output: Path
    device: str | None = None
    """cpu, cuda or npu; None: the nodes' kind."""


def evaluate(order: Order, where: str, on: str, inventory: Path | None, *, as_json: bool) -> None:
    """Evaluate on nodes, show the results and write them into the order's folder."""
    files: dict[str, Path | bytes] = {}
    arguments, named = [*order.arguments, "--output", "{run_dir}/evaluations", "--json"], dict[str, Path]()
    for number, task in enumerate(order.tasks):
        name, given, file = task.partition("=")
        data = Path(file) if given else order.data
        if data is None:
            arguments += ["--task", name]
            continue
        stem = f"data-{number}/{data.name}"
        files |= {f"data-{number}/{part.name}": part for part in _parts(data)}
        named[stem] = data
        arguments += ["--task", f"{name}={{data}}/{stem}"]
    if order.tokenizer:
        if not order.tokenizer.is_file():
            raise UsageError(f"{order.tokenizer}: no such file", "name a tokenizer.json")
        files["tokenizer.json"] = order.tokenizer
        arguments += ["--tokenizer", "{data}/tokenizer.json"]
    target = place.on_nodes(where, on, inventory)
    ranks = place.ranks_of(target.cluster, order.device)
    answer = place.answer_of(target, "evaluate", arguments, files, ranks)
    results = json.loads(answer)
    for result in results:
        _name_local(result, named, target)
        _store(order.output, result)
    screen.show_json(results) if as_json else screen.write(_text(results))


def _parts(data: Path) -> list[Path]:
    """Return the files of a task's data: itself, or those of a corpus that is named without .bin."""
    if data.is_file():
        return [data]
    found = [part for part in sorted(data.parent.glob(f"{data.name}*")) if part.is_file()]
    if not found or not data.name:
        raise UsageError(f"{data} does not exist", "name a local file, or a corpus without .bin")
    return found


def _name_local(result: JsonObject, named: dict[str, Path], target: place.OnNodes) -> None:
    """Name files as they are called here."""
    for stem, data in named.items():
        if str(result["data"]).endswith(f"/{stem}"):
            result["data"] = str(data)
    if target.local:
        result["checkpoint"] = str(target.local)


def _store(folder: Path, result: JsonObject) -> None:
    identity = json.dumps({name: result[name] for name in IDENTITY}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result['task']}-step-{result['step']:08d}-{key}.json"
    replace_file(file, (json.dumps(result, indent=1) + "\n").encode())


def _text(results: list[JsonObject]) -> str:
    lines = []
    for result in results:
        lines.append(f"{result['task']} ({result['convention']}) on {result['data']}, step {result['step']}:")
        for name, metric in result["metrics"].items():
            error = metric["standard_error"]
            lines.append(f"  {name:20} {metric['value']:.6g}" + ("" if error is None else f"  ± {error:.4g}"))
    return "".join(f"{line}\n" for line in lines)
