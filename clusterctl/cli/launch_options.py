"""The options of `launch`, `resume` and `attach`."""

from __future__ import annotations

from typing import Annotated

import typer

Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once the run has started; follow it with `attach`.")
]
Restarts = Annotated[
    int | None,
    typer.Option(
        "--restarts",
        metavar="N",
        min=0,
        help="Restart after a failure, at most N times; see `restart` in the job file.",
    ),
]
HangAfter = Annotated[
    str | None,
    typer.Option(
        "--hang-after",
        metavar="TIME",
        help="Treat the run as hung after this long without a step (or, for your own program, without output): 10m.",
    ),
]
Notify = Annotated[
    str | None,
    typer.Option(
        "--notify",
        metavar="CMD|URL",
        help="Call a command or webhook when the run ends, fails, restarts or stalls; see `notify` in the job file.",
    ),
]
NoChecks = Annotated[
    bool, typer.Option("--no-checks", help="Skip the checks of disks, devices and ports before the start.")
]
Share = Annotated[
    bool,
    typer.Option("--share-devices", help="Allow devices that another run of yours is using."),
]
