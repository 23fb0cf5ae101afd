"""Write a run for Weights & Biases or MLflow: files on this machine, no server is contacted."""

from __future__ import annotations

import csv
import importlib
import io
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl import extras
from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import RunDir
from clusterctl.report.config import flat_config
from clusterctl.report.history import COLUMNS, History, read_history
from clusterctl.report.summary import read_sources, summary_of
from clusterctl.text import plural

# The columns of steps that are exported, by the names that they get.
NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens": "train/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "samples_per_second": "speed/samples_per_second",
    "step_seconds": "speed/step_seconds",
    "own_seconds": "speed/own_seconds",
}
EVALUATION = "validation/loss"
PROJECT = "clusterctl"
# Limit of entries of one request to MLflow's store.
METRICS_AT_ONCE, SETTINGS_AT_ONCE = 1000, 100
# Limit of characters of a setting's value in MLflow.
LONGEST_SETTING = 6000


@dataclass(frozen=True)
class Row:
    """The values of one step; for a repeated step, only the last time counts."""

    step: int
    time: float
    """Seconds since the epoch; 0 if unknown."""
    values: dict[str, float]


def rows(history: History) -> Iterator[Row]:
    """Yield the steps that count with their values, a validation loss with the step after which it was computed."""
    evals = dict(history.kept_evals())
    steps = history.steps
    for index in steps.kept():
        step = steps.step[index]
        values = {name: steps[column][index] for column, name in NAMES.items()}
        if step in evals:
            values[EVALUATION] = evals.pop(step)
        at = steps["time"][index]
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        yield Row(step, at if math.isfinite(at) else 0.0, known)


def _exported(run: RunDir) -> tuple[list[Row], dict[str, str]]:
    sources = read_sources(run)
    found = list(rows(sources.history))
    if not found:
        raise UsageError(f"{run.run_id} has no steps", "`clusterctl runs` shows how far each run came")
    return found, flat_config(sources.record, sources.history)


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"--{extra}: {error}", extras.command(extra)) from None


def write_wandb(run: RunDir, folder: Path) -> tuple[Path, str]:
    """Write an offline run of Weights & Biases; return its folder and the command that uploads it."""
    wandb = _package("wandb", "wandb")
    found, config = _exported(run)
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        mode="offline", silent=True, console="off", disable_git=True, save_code=False,
        x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
    )  # fmt: skip
    tracked = wandb.init(
        dir=str(folder), project=PROJECT, name=run.run_id, id=run.run_id, config=config, settings=settings
    )
    for row in found:
        tracked.log({**row.values, **({"_timestamp": row.time} if row.time else {})}, step=row.step)
    place = Path(tracked.dir).parent
    tracked.finish()
    return place, f"wandb sync {shlex.quote(str(place))}"


def write_mlflow(run: RunDir, folder: Path) -> tuple[Path, str]:
    """Write the run into the MLflow data base of a folder; return its file and the command that shows it."""
    mlflow = _package("mlflow", "mlflow")
    for name in ("sqlalchemy", "alembic"):
        _package(name, "mlflow")
    found, config = _exported(run)
    summary = summary_of(run, read_sources(run))
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "mlflow.db").absolute()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{file}")
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    if client.search_runs([number], f"attributes.run_name = '{run.run_id}'"):
        raise UsageError(f"{file} has {run.run_id} already", "name another folder, or delete the run there")
    began = int(summary.created * 1000)
    tracked = client.create_run(number, start_time=began, run_name=run.run_id).info.run_id
    settings = [mlflow.entities.Param(key, value[:LONGEST_SETTING]) for key, value in config.items()]
    for start in range(0, len(settings), SETTINGS_AT_ONCE):
        client.log_batch(tracked, params=settings[start : start + SETTINGS_AT_ONCE])
    metrics = [
        mlflow.entities.Metric(name, value, int(row.time * 1000) or began, row.step)
        for row in found
        for name, value in row.values.items()
    ]
    for start in range(0, len(metrics), METRICS_AT_ONCE):
        client.log_batch(tracked, metrics=metrics[start : start + METRICS_AT_ONCE])
    status = {"finished": "FINISHED", "running": "RUNNING", "stopped": "KILLED"}.get(
        str(summary.phase), "FAILED"
    )
    client.set_terminated(tracked, status, int((summary.created + summary.seconds) * 1000))
    client.set_tag(tracked, "ranks", plural(summary.ranks, "rank"))
    return file, f"mlflow ui --backend-store-uri sqlite:///{shlex.quote(str(file))}"


HEAD = ("event", "step", "attempt", *COLUMNS)


def as_csv(run: RunDir) -> str:
    """Return the steps and evaluations of a run as CSV, in the order in which they were done."""
    history = read_history(run)
    attempts = [start.facts.get("attempt", "") for start in history.starts] or [""]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    steps = history.steps
    columns = [steps[name] for name in COLUMNS]
    for index, step in enumerate(steps.step):
        values = ["" if math.isnan(column[index]) else f"{column[index]:.10g}" for column in columns]
        writer.writerow(["step", step, attempts[min(steps.start[index], len(attempts) - 1)], *values])
    blank = [""] * (len(COLUMNS) - 2)
    for line, start in zip(history.evals, history.eval_starts, strict=True):
        attempt, at = attempts[min(start, len(attempts) - 1)], "" if line.time is None else line.time
        writer.writerow(["eval", line.step, attempt, line.loss, *blank, at])
    return text.getvalue()
