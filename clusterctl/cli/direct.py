"""The commands that are typed most, without the files of all others: 10 ms of every start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

VERBS = ("exec", "push", "pull")


def command_for(argv: list[str]) -> Callable[..., Any]:
    """The command line with no more of it than these arguments name."""
    if argv[:1] and argv[0] in VERBS and "clusterctl.cli.program" not in sys.modules:
        return _alone(argv[0])
    from clusterctl.cli import program

    return program.command_for(argv)


def _alone(verb: str) -> Callable[..., Any]:
    import typer.main

    from clusterctl.cli import reaching, root

    app = root.new()
    app.command(verb)(_function(verb))
    reaching.mark(app, verb)
    return typer.main.get_command(app)


def _function(verb: str) -> Callable[..., None]:
    if verb == "exec":
        from clusterctl.cli.exec import exec_

        return exec_
    from clusterctl.cli import push

    return push.push if verb == "push" else push.pull
