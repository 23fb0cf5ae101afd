"""`checkpoint import` and `checkpoint export`: run by the trainer in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clusterctl.cli import options
from clusterctl.cli.models.generate import Where
from clusterctl.cli.models.trainer import forward
from clusterctl.cli.option_values import READ_WEIGHTS, WEIGHTS
from clusterctl.wire.requests import TYPES

Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write; it must not exist.")
]
State = Annotated[
    bool, typer.Option("--state", help="Convert the state of the optimizer too, if the format has it.")
]
Base = Annotated[str, typer.Option("--base", metavar="DIR", help="The weights that the adapters belong to.")]


def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint of another program.")],
    output: Output,
    form: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            callback=options.one_of(READ_WEIGHTS),
            help="The format of SRC. Default: detected from its files.",
        ),
    ] = None,
    heads: Annotated[
        int, typer.Option(min=0, metavar="N", help="Attention heads, if SRC does not record them.")
    ] = 0,
    vocab: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens, if the table of SRC has padding.")
    ] = 0,
    base: Base = "",
    *,
    state: State = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Write another program's checkpoint as one of ours.

    The result is a checkpoint of step 0, or with --state of the step where the other program saved it. Start a
    conversion that was stopped again: it continues.
    """
    arguments = [str(source), "--output", str(output), *(["--from", form] if form else [])]
    arguments += ["--heads", str(heads), "--vocab", str(vocab), *_base(base)]
    forward("checkpoint import", "checkpoint-import", [*arguments, *_flags(state, dry_run, as_json)])


def export(
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            callback=options.one_of(WEIGHTS),
            help="The format to write: hf, megatron, mindspore, ...",
        ),
    ],
    output: Output,
    where: Where = "last",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            callback=options.one_of(TYPES),
            help="The type of the weights: fp32, bf16 or fp16.",
        ),
    ] = "fp32",
    tensor: Annotated[
        int, typer.Option(min=1, metavar="N", help="Megatron: divide each matrix into N files.")
    ] = 1,
    pipeline: Annotated[
        int, typer.Option(min=1, metavar="N", help="Megatron: divide the layers into N stages.")
    ] = 1,
    base: Base = "",
    *,
    state: State = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Write a checkpoint of ours in the format of another program.

    Adapters are added to the weights that they belong to; --to peft writes them alone.
    """
    from clusterctl.cli.models import place

    sizes = ["--tensor", str(tensor), "--pipeline", str(pipeline)]
    arguments = [
        str(place.here(where)),
        "--output",
        str(output),
        "--to",
        to,
        "--dtype",
        dtype,
        *sizes,
        *_base(base),
    ]
    forward("checkpoint export", "checkpoint-export", [*arguments, *_flags(state, dry_run, as_json)])


def _base(base: str) -> list[str]:
    return ["--base", str(Path(base).absolute())] if base else []


def _flags(state: bool, dry_run: bool, as_json: bool) -> list[str]:
    given = {"--state": state, "--dry-run": dry_run, "--json": as_json}
    return [name for name, wanted in given.items() if wanted]
