"""`python -m trainer evaluate`: write the results of one or several tasks to stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clusterctl.wire.arguments import wrong_options
from clusterctl.wire.requests import EvaluateRequest
from trainer.env import Env
from trainer.errors import InputError

# Seconds between two lines of progress: on a terminal, and otherwise.
EVERY = (0.5, 30.0)


def run(request: EvaluateRequest) -> int:
    """Evaluate, print the results and return 0."""
    from trainer.device import open_device
    from trainer.evaluate.evaluate import Order, Subject, evaluate
    from trainer.parallel.group import Group, leave

    tasks = [_task(text, request.tasks.data) for text in request.tasks.task]
    _check(tasks, request)
    own = Env.read()
    model = request.model
    kind = model.device or own.device_kind
    device = open_device(kind, own.local_rank, own.local_world_size, None, deterministic=False)
    group = Group.join(own, device)
    subject = Subject.load(
        request.checkpoint,
        model.tokenizer,
        device,
        model.base,
        model.weights,
        model.add_bos,
    )
    shown = []
    for name, data in tasks:
        order = Order(name, data, request.output, request.model.scoring, request.batch_tokens)
        result = evaluate(subject, order, group, _Report(name, group.rank))
        shown.append(result.as_json())
        if group.rank == 0 and not request.json:
            _show(result.as_json())
    if group.rank == 0 and request.json:
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    leave(group, 0)
    return 0


def _task(text: str, data: Path | None) -> tuple[str, Path | None]:
    name, given, file = text.partition("=")
    return name, Path(file) if given else data


def _check(tasks: Sequence[tuple[str, Path | None]], request: EvaluateRequest) -> None:
    """Raise one InputError for all unknown tasks, missing files and wrong numbers, before the first task starts."""
    from trainer.evaluate.tasks import TASKS

    unknown = [f"there is no task {name!r}" for name, _ in tasks if name not in TASKS]
    # A corpus is named without .bin and .idx.
    absent = [
        f"{file} does not exist" if str(file) != "." else "the file name of a task is empty"
        for _, file in tasks
        if file is not None and (str(file) == "." or (not file.exists() and not Path(f"{file}.idx").exists()))
    ]
    numbers = list(wrong_options(request))
    hints = [f"use one of: {', '.join(TASKS)}"] * bool(unknown)
    hints += ["name a local file, or a corpus without .bin"] * bool(absent)
    if unknown or absent or numbers:
        raise InputError("\n".join([*unknown, *absent, *numbers]), "\n  try: ".join(hints))


class _Report:
    """Writes progress to stderr: one changing line on a terminal, a new line every 30 s otherwise."""

    def __init__(self, task: str, rank: int) -> None:
        self._task, self._rank = task, rank
        self._started = time.monotonic()
        self._shown = self._started - EVERY[0]

    def __call__(self, done: int, total: int, tokens: int) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if self._rank or (now - self._shown < EVERY[not terminal] and done < total):
            return
        self._shown = now
        speed = tokens / max(now - self._started, 1e-9)
        text = f"{self._task}: {min(done, total):,} of {total:,} requests, {speed:,.0f} tokens/s"
        end = "\n" if not terminal or done >= total else ""
        sys.stderr.write(("\r\033[K" if terminal else "") + text + end)
        sys.stderr.flush()


def _show(result: dict[str, object]) -> None:
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    lines = [
        f"{result['task']} ({result['convention']}) on {result['data']}, step {result['step']}:"
        f" {result['documents']:,} examples, {result['tokens']:,} tokens, {result['seconds']} s"
    ]
    for name, metric in metrics.items():
        error = metric["standard_error"]
        more = "" if error is None else f"  ± {error:.4g}"
        lines.append(f"  {name:20} {metric['value']:.6g}{more}")
    if result["truncated"]:
        lines.append(
            f"  {result['truncated']:,} contexts are longer than the model's window; their beginnings were cut off"
        )
    sys.stdout.write("\n".join(lines) + "\n")
