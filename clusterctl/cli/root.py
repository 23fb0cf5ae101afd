"""What stands before every command: the program itself, its version, and an inventory named first."""

from __future__ import annotations

import typer

from clusterctl.cli import options


def new() -> typer.Typer:
    """The program without any command."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,  # the door words every error; locals in a traceback can hold secrets
        rich_markup_mode=None,
        help="From a handful of machines that answer to SSH to a trained GPT or GLM.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(program)
    return app


def program(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="The version, and nothing else."),
    cluster: options.ClusterFile = None,
) -> None:
    """From a handful of machines that answer to SSH to a trained GPT or GLM."""
    from clusterctl import __version__
    from clusterctl.cli import screen

    if version:
        screen.write(f"clusterctl {__version__}\n")
        raise typer.Exit
    if cluster is not None:
        context.default_map = _for_all(context.command, {"cluster": str(cluster)})


def _for_all(command: object, values: dict[str, str]) -> dict[str, object]:
    """Defaults for every command below one, as click wants them: by the commands' names; a noun has its own too."""
    below: dict[str, object] = getattr(command, "commands", {})
    return {**values, **{name: _for_all(one, values) for name, one in below.items()}}
