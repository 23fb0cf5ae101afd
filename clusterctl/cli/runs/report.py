"""`report` and `compare`: a run as one HTML file, and several runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.declared import option
from clusterctl.errors import UsageError

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Where to write. Default: report.html in the run's folder."
    ),
]


def report(
    run: options.RunName = "last",
    output: Output = None,
    against: str | None = option("Show how the configuration differs from this run.", metavar="RUN"),
    csv: Path | None = option("Also write the steps and evaluations as CSV.", metavar="FILE"),
    wandb: Path | None = option("Also write an offline run of Weights & Biases there.", metavar="DIR"),
    mlflow: Path | None = option("Also write the run into an MLflow data base there.", metavar="DIR"),
    *,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write a run as one HTML file that needs no network: curves, attempts, ranks, configuration, logs."""
    from clusterctl.files import replace_file
    from clusterctl.report.page import page
    from clusterctl.report.summary import summarise
    from clusterctl.report.trackers import as_csv

    found = options.run_with_results(run)
    if as_json:
        screen.show_json(summarise(found).as_json())
        return
    target = output or found.root / "report.html"
    for path in filter(None, (output, csv)):
        check_target(path, force=force)
    replace_file(target, page(found, options.run_with_results(against) if against else None))
    if csv:
        replace_file(csv, as_csv(found))
        screen.write(f"{csv}\n")
    if wandb or mlflow:
        from clusterctl.report import trackers

        for folder, write in ((wandb, trackers.write_wandb), (mlflow, trackers.write_mlflow)):
            if folder:
                written, command = write(found, folder)
                screen.write(f"{written}\n")
                screen.log(f"next       {command}")
    screen.write(f"{target}\n")


def check_target(path: Path, *, force: bool) -> None:
    """Raise a UsageError if a file cannot or must not be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"no folder {path.absolute().parent}"
        raise UsageError(f"{path}: {reason}", "give the path of a file in an existing folder")
    if path.exists() and not force and not _is_ours(path):
        raise UsageError(f"{path} exists and was not written by clusterctl", "another name, or --force")


def _is_ours(path: Path) -> bool:
    """Return whether a file is a report or a table that this command wrote before."""
    with path.open("rb") as file:
        head = file.read(400)
    return b"Content-Security-Policy" in head or head.startswith(b"event,step,")


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Two or more runs; the first is the base.")
    ],
    html: Path | None = option("Also write the comparison as an HTML file.", metavar="FILE"),
    tolerance: float = option(
        "Treat losses as equal within this share: 1e-6.", default=0.0, min=0.0, metavar="SHARE"
    ),
    *,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Compare runs: settings that differ, losses, speed, and the first step at which the losses differ."""
    from clusterctl.cli.views import compare
    from clusterctl.files import replace_file
    from clusterctl.report import compare as comparing
    from clusterctl.report.page import Subject

    found = [options.run_named(name) for name in runs]
    if len({run.root for run in found}) < 2:
        raise UsageError("compare needs two different runs", "`clusterctl runs` lists them")
    if html:
        check_target(html, force=force)
    comparison = comparing.compare([Subject.of(run) for run in found], tolerance)
    if html:
        replace_file(html, comparing.page(comparison))
    if as_json:
        screen.show_json(comparison.as_json())
    else:
        screen.show(*compare.parts(comparison, screen.out_console()))
        if html:
            screen.log(f"wrote {html}")
