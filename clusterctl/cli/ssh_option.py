"""The option `--ssh` of every command that connects to nodes."""

from __future__ import annotations

import shutil
from contextvars import ContextVar, Token
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperOption
from typer.main import get_click_type

from clusterctl.cli import screen
from clusterctl.errors import UsageError
from clusterctl.settings import load_settings

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster

_CHOSEN: ContextVar[str | None] = ContextVar("ssh", default=None)
_USER: ContextVar[str | None] = ContextVar("user", default=None)
_PORT: ContextVar[int | None] = ContextVar("port", default=None)
USER = "Log in as this user, for this command; USER@SET does it for some nodes."
PORT = "Use this port of SSH, for this command."
HELP = (
    "SSH client: paramiko, the `ssh` program of OpenSSH, or auto: paramiko unless a node's settings need `ssh`. "
    "Default: $CLUSTERCTL_SSH, else auto."
)


class Reaching(TyperCommand):
    """A command with `--ssh`; while it runs, `chosen()` returns the value.

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
            for name, variable in (("ssh", _CHOSEN), ("ssh_user", _USER), ("ssh_port", _PORT))
        ]
        try:
            return super().invoke(ctx)
        finally:
            for variable, token in tokens:
                variable.reset(token)


def _ports() -> Any:
    """Return the type of port numbers."""
    return get_click_type(annotation=int, parameter_info=typer.Option(min=1, max=65535))


def with_login(cluster: Cluster) -> Cluster:
    """Return the cluster with the user and port of the command line."""
    user, port = _USER.get(), _PORT.get()
    if user is None and port is None:
        return cluster
    from clusterctl.inventory.cluster import USER as LEGAL

    if user is not None and not LEGAL.match(user):
        raise UsageError(f"--user {user!r} can't be a login name", "as in --user alice")
    nodes = (replace(node, user=user or node.user, port=port or node.port) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def chosen() -> str:
    """Return the SSH client of the command line, else of the settings."""
    from clusterctl.ssh.choose import checked

    return checked(_CHOSEN.get() or load_settings().ssh)


def warn_without_ssh(cluster: Cluster) -> None:
    """Warn that ~/.ssh/config is ignored because the `ssh` program is missing."""
    config = Path("~/.ssh/config").expanduser()
    by_ssh = any(node.host != "local" and not node.allocation for node in cluster.nodes)
    if by_ssh and shutil.which("ssh") is None and config.is_file():
        screen.log(f"`ssh` is not installed, so {config} is ignored; only the inventory is used")
