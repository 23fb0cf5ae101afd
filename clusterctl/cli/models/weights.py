"""`checkpoint import` and `checkpoint export`: run by the trainer in a separate process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from clusterctl.cli import options
from clusterctl.cli.models.generate import Where
from clusterctl.cli.models.trainer import forward
from clusterctl.wire.arguments import arguments_of
from clusterctl.wire.requests import ConvertIn, ConvertOut, ExportOptions, ImportOptions

Wanted = TypeVar("Wanted", ImportOptions, ExportOptions)


def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint of another program.")],
    wanted: ImportOptions,
    *,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Write another program's checkpoint as one of ours.

    The result is a checkpoint of step 0, or with --state of the step where the other program saved it. Start a
    conversion that was stopped again: it continues.
    """
    request = ConvertIn(source=source, options=_absolute(wanted), dry_run=dry_run, json=as_json)
    forward("checkpoint import", "checkpoint-import", arguments_of(request))


def export(
    wanted: ExportOptions,
    where: Where = "last",
    *,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Write a checkpoint of ours in the format of another program.

    Adapters are added to the weights that they belong to; --to peft writes them alone.
    """
    from clusterctl.cli.models import place

    request = ConvertOut(source=place.here(where), options=_absolute(wanted), dry_run=dry_run, json=as_json)
    forward("checkpoint export", "checkpoint-export", arguments_of(request))


def _absolute(wanted: Wanted) -> Wanted:
    """Return options whose --base does not depend on the current folder."""
    base = wanted.request.base
    return replace(wanted, request=replace(wanted.request, base=str(Path(base).absolute()) if base else ""))
