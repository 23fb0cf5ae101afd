"""The option `--ssh` of every command that connects to nodes."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption
from typer.main import get_click_type

from clusterctl.cli import choices

USER = "Log in as this user, for this command; USER@SET does it for some nodes."
PORT = "Use this port of SSH, for this command."
HELP = (
    "SSH client: paramiko, the `ssh` program of OpenSSH, or auto: paramiko unless a node's settings need `ssh`. "
    "Default: $CLUSTERCTL_SSH, else auto."
)


class Reaching(TyperCommand):
    """A command with `--ssh`; while it runs, `choices.SSH` has the value.

    One that reads an inventory also has `--user` and `--port`, which change the login for this call.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params.append(
            TyperOption(param_decls=["--ssh"], type=str, metavar="auto|paramiko|openssh", help=HELP)
        )
        if any(param.name == "cluster" for param in self.params):
            short = [] if any("-l" in param.opts for param in self.params) else ["-l"]
            self.params += [
                TyperOption(param_decls=["ssh_user", "--user", *short], type=str, metavar="NAME", help=USER),
                TyperOption(param_decls=["ssh_port", "--port"], type=_ports(), metavar="N", help=PORT),
            ]

    def invoke(self, ctx: Any) -> Any:
        tokens: list[tuple[ContextVar[Any], Token[Any]]] = [
            (variable, variable.set(ctx.params.pop(name, None)))
            for name, variable in (
                ("ssh", choices.SSH),
                ("ssh_user", choices.USER),
                ("ssh_port", choices.PORT),
            )
        ]
        try:
            return super().invoke(ctx)
        finally:
            for variable, token in tokens:
                variable.reset(token)


def _ports() -> Any:
    """Return the type of port numbers."""
    return get_click_type(annotation=int, parameter_info=typer.Option(min=1, max=65535))
